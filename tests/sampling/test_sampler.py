from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from engine.request import SamplingParams
from engine.sampling import candidates
from engine.sampling.logprobs import token_logprobs
from engine.sampling.noise import MAX_NOISE, gumbel_noise, row_keys
from engine.sampling.restrict import smallest_kept
from engine.sampling.sampler import INVALID, sample, sample_with_confidence

NUM_SAMPLES = 20_000


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 1, "seed": 0} | values))


def reference_distribution(logits: np.ndarray, p: SamplingParams) -> np.ndarray:
    """The definition, spelt out: scale, keep top-k, then the nucleus, then min-p; renormalise."""
    scaled = logits.astype(np.float64) / p.temperature
    order = np.argsort(-scaled, kind="stable")
    probs = np.exp(scaled - scaled.max())
    if p.top_k:
        probs[order[p.top_k :]] = 0.0
    probs /= probs.sum()
    if p.top_p < 1.0:
        before = np.cumsum(probs[order]) - probs[order]
        probs[order[before >= p.top_p]] = 0.0
    probs[probs < p.min_p * probs.max()] = 0.0
    return probs / probs.sum()


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 1.7},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.7},
        {"temperature": 1.3, "min_p": 0.1},
        {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    ],
)
def test_sampled_frequencies_are_the_distribution(settings: dict[str, Any]) -> None:
    logits = torch.tensor(np.random.default_rng(1).normal(0, 2, 50).astype(np.float32))
    p = params(**settings, seed=12345)
    expected = reference_distribution(logits.numpy(), p)
    drawn = sample(logits.expand(NUM_SAMPLES, -1), [p] * NUM_SAMPLES, list(range(NUM_SAMPLES)))
    counts = np.bincount(drawn, minlength=50)
    assert counts[expected == 0].sum() == 0
    frequent = expected * NUM_SAMPLES >= 5
    observed = np.append(counts[frequent], counts[~frequent].sum())
    wanted = np.append(expected[frequent], expected[~frequent].sum()) * NUM_SAMPLES
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    assert stats.chisquare(observed, wanted).pvalue > 1e-3


def test_samples_over_seeds_follow_the_distribution_too() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    seeds = [params(temperature=1.0, seed=i) for i in range(NUM_SAMPLES)]
    counts = np.bincount(
        sample(logits.expand(NUM_SAMPLES, -1), seeds, [3] * NUM_SAMPLES), minlength=4
    )
    wanted = logits.softmax(0).double().numpy()
    assert stats.chisquare(counts, wanted / wanted.sum() * NUM_SAMPLES).pvalue > 1e-3


def test_a_row_is_sampled_the_same_alone_and_in_a_batch() -> None:
    logits = torch.randn(16, 1000, generator=torch.Generator().manual_seed(2)) * 3
    mixed = [
        params(temperature=0.0 if i % 3 == 0 else 1.0, top_p=0.9 if i % 2 else 1.0, seed=i)
        for i in range(16)
    ]
    together = sample(logits, mixed, list(range(16)))
    alone = [sample(logits[i : i + 1], [mixed[i]], [i])[0] for i in range(16)]
    assert together == alone


@pytest.mark.parametrize("natively", [True, False])
def test_leaving_out_hopeless_tokens_changes_nothing(
    natively: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not natively:
        monkeypatch.setattr(candidates, "native_available", lambda: "not in this test")
    logits = torch.randn(64, 4000, generator=torch.Generator().manual_seed(3)) * 6
    rows = [params(temperature=1.0, seed=i) for i in range(64)]
    keys = row_keys(torch.arange(64), torch.zeros(64, dtype=torch.int64))
    noise = gumbel_noise(keys[:, None].expand(-1, 4000), torch.arange(4000).expand(64, -1))
    assert sample(logits, rows, [0] * 64) == (logits.double() + noise).argmax(1).tolist()


def test_noise_is_standard_gumbel_and_bounded() -> None:
    keys = row_keys(torch.tensor([7]), torch.tensor([9]))
    noise = gumbel_noise(keys.expand(200_000), torch.arange(200_000))
    assert noise.max() <= MAX_NOISE
    assert math.isclose(MAX_NOISE, 22.87, abs_tol=0.01)
    assert stats.kstest(noise.numpy(), "gumbel_r").pvalue > 1e-3


@pytest.mark.parametrize("lag", ["seed", "position", "token"])
def test_noise_of_neighbouring_keys_is_uncorrelated(lag: str) -> None:
    count = 50_000
    steps = torch.arange(count)
    seeds = steps if lag == "seed" else torch.zeros_like(steps)
    positions = steps if lag == "position" else torch.zeros_like(steps)
    tokens = steps if lag == "token" else torch.zeros_like(steps)
    noise = gumbel_noise(row_keys(seeds, positions), tokens).numpy()
    assert abs(np.corrcoef(noise[:-1], noise[1:])[0, 1]) < 0.02


def kept(logits: torch.Tensor, *rows: SamplingParams) -> list[int]:
    """How many tokens of each row are left in."""
    return (logits >= smallest_kept(logits, rows)[:, None]).sum(dim=1).tolist()


def test_wide_nucleus_keeps_ties() -> None:
    logits = torch.zeros(1, 5000)
    logits[0, :10] = 1e-3
    # All but ten are tied with the last one kept.
    assert kept(logits, params(temperature=1.0, top_p=0.9)) == [5000]


def test_top_k_beyond_the_vocabulary_keeps_everything() -> None:
    assert kept(torch.randn(1, 10), params(top_k=10_000)) == [10]


def test_rows_are_cut_each_in_its_own_way() -> None:
    logits = torch.linspace(-200.0, 0.0, 5000).repeat(3, 1)
    rows = params(top_k=4000), params(top_p=0.5, temperature=1.0), params(min_p=0.5)
    by_k, by_p, by_min = kept(logits, *rows)
    assert by_k == 4000
    assert 0 < by_p < 100
    assert by_min == 18  # log(2) / (200 / 4999), and the likeliest


def test_top_p_counts_only_what_top_k_keeps() -> None:
    logits = torch.log(torch.tensor([[0.4, 0.2, 0.2, 0.1, 0.1]]))
    logits[0, 1] += 1e-3
    assert kept(logits, params(top_k=2, top_p=0.6)) == [1]
    assert kept(logits, params(top_p=0.6)) == [2]


def test_rows_without_numbers_do_no_harm() -> None:
    logits = torch.full((3, 50), torch.nan)
    logits[1] = torch.linspace(0.0, 9.0, 50)
    logits[2] = -torch.inf
    rows = [params(temperature=1.0, top_k=5, top_p=0.5, seed=i) for i in range(3)]
    bad, good, empty = sample(logits, rows, [0, 0, 0])
    assert (bad, empty) == (INVALID, INVALID)
    assert 45 <= good < 50


def test_logprobs_are_those_of_the_unprocessed_logits() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    (entry,) = token_logprobs(logits, [2], [2], [b"a", b"b", b"c"])
    wanted = logits.log_softmax(1)[0].tolist()
    assert (entry.token_id, entry.token_bytes) == (2, b"c")
    assert entry.logprob == pytest.approx(wanted[2])
    assert [(i, piece) for i, piece, _ in entry.top] == [(1, b"b"), (2, b"c")]
    (padded,) = token_logprobs(logits, [3], [0], [b"a", b"b", b"c"])
    assert (padded.token_bytes, padded.top) == (b"", ())


def test_certainty_is_of_the_likeliest_or_of_the_margin_of_the_draw() -> None:
    logits = torch.randn(40, 500, generator=torch.Generator().manual_seed(7)) * 2
    rows = [params(temperature=0.0 if i % 2 else 0.7, seed=i) for i in range(40)]
    choices = sample_with_confidence(logits, rows, [3] * 40)
    assert choices.token_ids == sample(logits, rows, [3] * 40)
    keys = row_keys(torch.arange(40), torch.full((40,), 3))
    noise = gumbel_noise(keys[:, None].expand(-1, 500), torch.arange(500).expand(40, -1))
    for i, (token_id, confidence) in enumerate(
        zip(choices.token_ids, choices.confidences, strict=True)
    ):
        scores = logits[i].double() if i % 2 else logits[i] / 0.7 + noise[i]
        exact = float(scores.softmax(0)[token_id])
        # Rivals far below the winner are left out.
        assert exact - 1e-4 <= confidence <= min(1.0, exact * (1.01 if i % 2 else 1.5))


def test_draws_that_are_close_are_rarely_the_same_for_close_logits() -> None:
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(400, 300, generator=generator) * 2
    other = logits + 0.5 * torch.randn(400, 300, generator=generator)
    rows = [params(temperature=1.0, seed=i) for i in range(400)]
    choices = sample_with_confidence(logits, rows, [0] * 400)
    same = np.array(choices.token_ids) == np.array(sample(other, rows, [0] * 400))
    sure = np.array(choices.confidences) > np.median(choices.confidences)
    assert same[sure].mean() > 0.8
    assert same[sure].mean() > same[~sure].mean() + 0.2
