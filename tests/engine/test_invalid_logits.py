"""Logits that are no numbers end their own request."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from engine.plan import StepPlan, pack
from engine.request import FinishReason, SamplingParams
from engine.sampling.sampler import INVALID, sample
from engine.serving.recovery import EngineBrokenError
from engine.verify import INVALID_LOGITS
from tests.engine.helpers import make_core, make_request, run_all, tokens_of
from tests.engine.mock_model import VOCAB_SIZE, MockRunner
from tests.engine.test_core import OracleDrafter, plain_answers, requests_of, tokenizer
from tests.engine.test_isolation import check_untouched, drafters_for

NAN, INF = math.nan, math.inf


class SickRunner(MockRunner):
    """Spoils the logits of one request from a position on."""

    def __init__(self, bad: str, since: int, value: float, *, whole_row: bool = False) -> None:
        super().__init__(128)
        self._bad = bad
        self._since = since
        self._value = value
        self._whole_row = whole_row

    def execute(self, plan: StepPlan) -> torch.Tensor:
        logits = super().execute(plan)
        packed = pack(plan, self.block_size)
        owners = np.searchsorted(packed.query_starts, packed.logit_rows, side="right") - 1
        for row, (owner, position) in enumerate(
            zip(owners, packed.positions[packed.logit_rows], strict=True)
        ):
            if plan.chunks[owner].request_id == self._bad and position >= self._since:
                logits[row, slice(None) if self._whole_row else 17] = self._value
        return logits


@pytest.mark.parametrize("kind", ["greedy", "sampled", "repetition", "biased", "logprobs"])
@pytest.mark.parametrize("drafting", ["none", "ngram", "oracle"])
@pytest.mark.parametrize(
    ("value", "whole_row"), [(NAN, False), (NAN, True), (INF, False), (-INF, True)]
)
def test_invalid_logits_end_their_request_alone(
    kind: str, drafting: str, value: float, whole_row: bool
) -> None:
    requests = requests_of(kind)
    bad = requests[3].request_id
    num_prompt = len(requests[3].prompt_token_ids)
    core = make_core(
        SickRunner(bad, num_prompt + 2, value, whole_row=whole_row),
        drafters=drafters_for(drafting, requests),
        tokenizer=tokenizer(),
    )
    outputs = run_all(core, requests)
    ended = outputs.pop(bad)
    assert ended[-1].finish_reason is FinishReason.ERROR
    assert ended[-1].error == INVALID_LOGITS
    assert tokens_of(ended) == tokens_of(plain_answers(requests)[bad])[:3]
    check_untouched(outputs, requests)
    assert core.metrics.step_failures == 0
    assert core.scheduler.pool.num_free == 128


class SpoiltByDraftsRunner(MockRunner):
    """K and V of a draft token spoil the row in front of it, as 0 times NaN does."""

    def execute(self, plan: StepPlan) -> torch.Tensor:
        logits, first = super().execute(plan), 0
        for chunk in plan.chunks:
            if chunk.num_draft:
                logits[first : first + chunk.num_logits] = NAN
            first += chunk.num_logits
        return logits


@pytest.mark.parametrize("kind", ["greedy", "sampled", "repetition"])
def test_logits_spoilt_by_a_draft_are_computed_without_it(kind: str) -> None:
    requests = requests_of(kind)
    truth = {name: tokens_of(outputs) for name, outputs in plain_answers(requests).items()}
    drafter = OracleDrafter(truth, 5)
    core = make_core(SpoiltByDraftsRunner(128), drafters=[drafter], tokenizer=tokenizer())
    check_untouched(run_all(core, requests), requests)
    assert core.metrics.drafters["oracle"].failures >= 3
    assert not core.metrics.drafters["oracle"].works


def test_nothing_but_invalid_logits_means_a_broken_engine() -> None:
    class DeadRunner(MockRunner):
        def execute(self, plan: StepPlan) -> torch.Tensor:
            return torch.full_like(super().execute(plan), NAN)

    core = make_core(DeadRunner())
    core.add(make_request([1, 2], "a"))
    with pytest.raises(EngineBrokenError, match="invalid logits") as caught:
        core.step()
    assert [output.error for output in caught.value.outputs] == [INVALID_LOGITS]
    with pytest.raises(EngineBrokenError, match="weights are damaged"):
        make_core(DeadRunner()).warm_up()


def test_nobody_reuses_the_blocks_of_a_request_that_went_wrong() -> None:
    prompt = range(40)
    core = make_core(SickRunner("bad", 39, NAN))
    run_all(core, [make_request(prompt, "bad")])
    first = run_all(core, [make_request(prompt, "first")])["first"]
    assert first[-1].usage.cached_tokens == 0
    second = run_all(core, [make_request(prompt, "second")])["second"]
    assert second[-1].usage.cached_tokens == 36
    assert tokens_of(first) == tokens_of(second)


def test_prompt_scores_that_are_no_numbers() -> None:
    core = make_core(SickRunner("bad", 5, NAN))
    requests = [make_request(range(30), name, prompt_logprobs=1) for name in ("bad", "good")]
    outputs = run_all(core, requests)
    assert [o.error for o in outputs["bad"]] == [INVALID_LOGITS]
    assert outputs["good"][-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("extra", [{}, {"top_p": 0.9}, {"top_k": 5, "min_p": 0.1}])
def test_a_bad_row_does_not_move_its_neighbours(
    temperature: float, extra: dict[str, float]
) -> None:
    logits = torch.randn(6, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    params = [SamplingParams(9, seed=i, temperature=temperature, **extra) for i in range(6)]
    clean = sample(logits, params, [0] * 6)
    logits[1, 7], logits[3, 2], logits[4] = NAN, INF, -INF
    chosen = sample(logits, params, [0] * 6)
    assert [chosen[i] for i in (1, 3, 4)] == [INVALID] * 3
    assert [chosen[i] for i in (0, 2, 5)] == [clean[i] for i in (0, 2, 5)]
