"""The engine on the mock model: one output, however it is computed."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from engine.core import EngineCore
from engine.draft.drafter import Draft, Drafter, DraftRequest, FreeDrafter
from engine.draft.ngram import NgramDrafter
from engine.request import FinishReason, GenerationRequest, RequestError, RequestOutput
from tests.engine.helpers import (
    byte_tokenizer,
    make_core,
    make_request,
    run_all,
    text_of,
    tokens_of,
)
from tests.engine.mock_model import VOCAB_SIZE, MockRunner

SAMPLED = {"temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.4, "frequency_penalty": 0.2}
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": SAMPLED,
    "repetition": {"temperature": 1.0, "repetition_penalty": 1.3, "top_k": 8},
    "biased": {"temperature": 1.2, "min_p": 0.05, "logit_bias": {3: 2.0, 5: -100.0}},
    "logprobs": {"logprobs": 3, "temperature": 0.7},
    "stops": {"stop": ("AB", "$%&"), "temperature": 1.0, "max_tokens": 60},
    "stop ids": {"stop_token_ids": frozenset({11}), "min_tokens": 9, "max_tokens": 60},
}


class OracleDrafter(FreeDrafter):
    """Proposes the true continuation with some tokens spoilt: long and partial acceptances."""

    name = "oracle"

    def __init__(self, answers: dict[str, list[int]], spoil: int) -> None:
        self._answers = answers
        self._spoil = spoil

    def propose_one(self, request: DraftRequest) -> Draft:
        sequence = request.sequence
        answer = self._answers[sequence.request_id]
        draft = answer[sequence.num_output : sequence.num_output + request.max_tokens]
        return Draft(
            tuple(
                (token + 1) % VOCAB_SIZE if (sequence.num_output + i) % self._spoil == 0 else token
                for i, token in enumerate(draft)
            )
        )


class FailingDrafter(OracleDrafter):
    name = "failing"

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        raise RuntimeError("no draft today")


@functools.cache
def requests_of(kind: str, count: int = 8) -> tuple[GenerationRequest, ...]:
    rng = np.random.default_rng(5)
    defaults = {"max_tokens": 24} | PARAMS[kind]
    return tuple(
        make_request(
            rng.integers(0, VOCAB_SIZE, 3 + 5 * i).tolist(), f"{kind}-{i}", seed=i, **defaults
        )
        for i in range(count)
    )


@functools.cache
def plain_answers(requests: tuple[GenerationRequest, ...]) -> dict[str, list[RequestOutput]]:
    """Each request alone, without speculation or cache."""
    answers: dict[str, list[RequestOutput]] = {}
    for request in requests:
        core = make_core(MockRunner(), prefix_cache=False, tokenizer=tokenizer())
        answers |= run_all(core, [request])
    return answers


def tokenizer() -> Any:
    return byte_tokenizer(VOCAB_SIZE, eos_ids=[60])


def ngram() -> NgramDrafter:
    return NgramDrafter(min_match=1, max_match=3)


@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("drafting", ["none", "ngram", "oracle 2", "oracle 5", "failing"])
@pytest.mark.parametrize("num_blocks", [128, 26])
def test_output_is_the_same_however_it_is_computed(
    kind: str, drafting: str, num_blocks: int
) -> None:
    requests = requests_of(kind)
    expected = plain_answers(requests)
    truth = {name: tokens_of(outputs) for name, outputs in expected.items()}
    drafters: dict[str, list[Drafter]] = {
        "none": [],
        "ngram": [ngram()],
        "oracle 2": [OracleDrafter(truth, 2)],
        "oracle 5": [OracleDrafter(truth, 5)],
        "failing": [FailingDrafter(truth, 5), ngram()],
    }
    runner = MockRunner(num_blocks)
    core = make_core(runner, drafters=drafters[drafting], tokenizer=tokenizer())
    outputs = run_all(core, requests)
    assert {name: tokens_of(out) for name, out in outputs.items()} == truth
    for name, out in outputs.items():
        assert text_of(out) == text_of(expected[name])
        assert out[-1].finish_reason == expected[name][-1].finish_reason
        assert out[-1].stop_reason == expected[name][-1].stop_reason
        assert out[-1].usage.completion_tokens == len(truth[name])
        assert [p for o in out for p in o.logprobs] == [
            p for o in expected[name] for p in o.logprobs
        ]
    if num_blocks == 26 and kind == "greedy":
        assert core.metrics.preemptions > 0
    if drafting == "oracle 5":
        assert core.metrics.drafters["oracle"].accepted_tokens > 0
        assert core.metrics.target_passes < core.metrics.generated_tokens
    if drafting == "failing":
        assert core.metrics.drafters["failing"].failures > 0


def test_prefix_cache_hits_do_not_change_the_output() -> None:
    request = make_request(range(40), "a", max_tokens=10, **SAMPLED)
    again = make_request(range(40), "b", max_tokens=10, **SAMPLED)
    core = make_core(MockRunner(), drafters=[ngram()])
    first = run_all(core, [request])["a"]
    second = run_all(core, [again])["b"]
    assert tokens_of(first) == tokens_of(second)
    assert (first[-1].usage.cached_tokens, second[-1].usage.cached_tokens) == (0, 36)
    assert core.metrics.prefix_hits == 36


def test_seed_decides_the_sample() -> None:
    def answer(seed: int) -> list[int]:
        core = make_core(MockRunner())
        return tokens_of(
            run_all(core, [make_request([1, 2], "a", seed=seed, temperature=1.5)])["a"]
        )

    assert answer(1) == answer(1)
    assert answer(1) != answer(2)


def test_prompt_logprobs_survive_chunks_and_preemption() -> None:
    requests = tuple(
        make_request(range(1, 40), f"s{i}", prompt_logprobs=2, logprobs=0, max_tokens=20)
        for i in range(3)
    )
    expected = plain_answers(requests)
    core = make_core(MockRunner(num_blocks=20), tokenizer=tokenizer())
    outputs = run_all(core, requests)
    assert core.metrics.preemptions > 0
    for name, out in outputs.items():
        scores = out[0].prompt_logprobs
        assert scores is not None
        assert len(scores) == 39
        assert scores[0] is None
        assert [s.token_id for s in scores[1:] if s] == list(range(2, 40))
        assert scores == expected[name][0].prompt_logprobs
        assert all(o.prompt_logprobs is None for o in out[1:])


def test_max_tokens_zero_scores_the_prompt_and_generates_nothing() -> None:
    core = make_core(MockRunner())
    (output,) = run_all(core, [make_request(range(9), "a", max_tokens=0, prompt_logprobs=0)])["a"]
    assert output.finish_reason is FinishReason.LENGTH
    assert output.token_ids == ()
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == 9


def test_end_token_ends_and_ignore_eos_goes_on() -> None:
    answer = tokens_of(run_all(make_core(MockRunner()), [make_request([1, 2], "a")])["a"])
    eos = answer[3]
    core = make_core(MockRunner(), tokenizer=byte_tokenizer(VOCAB_SIZE, [eos]))
    outputs = run_all(
        core, [make_request([1, 2], "stops"), make_request([1, 2], "goes on", ignore_eos=True)]
    )
    ended = outputs["stops"]
    assert tokens_of(ended) == answer[: answer.index(eos) + 1]
    assert ended[-1].finish_reason is FinishReason.STOP
    assert ended[-1].stop_reason is None
    assert tokens_of(outputs["goes on"]) == answer


def abort_storm(core: EngineCore, rng: np.random.Generator) -> None:
    live: list[str] = []
    for index in range(200):
        request = make_request(
            rng.integers(0, VOCAB_SIZE, int(rng.integers(1, 40))).tolist(),
            f"x{index}",
            max_tokens=40,
        )
        core.add(request)
        live.append(request.request_id)
        for _ in range(int(rng.integers(0, 4))):
            for output in core.step():
                if output.finish_reason:
                    live.remove(output.request_id)
        if live and rng.random() < 0.8:
            core.abort(live.pop(int(rng.integers(len(live)))))
        core.check_integrity()
    for name in live:
        core.abort(name)


def test_200_aborts_in_random_places_leave_nothing_behind() -> None:
    core = make_core(MockRunner(num_blocks=40), drafters=[ngram()])
    abort_storm(core, np.random.default_rng(3))
    assert not core.has_work
    core.check_integrity()
    assert core.scheduler.pool.num_free == 40
    assert core.metrics.finished[FinishReason.ABORT] > 0
    request = make_request(range(5), "after")
    fresh = make_core(MockRunner())
    assert tokens_of(run_all(core, [request])["after"]) == tokens_of(
        run_all(fresh, [request])["after"]
    )


def test_abort_of_an_unknown_request_is_ignored() -> None:
    core = make_core(MockRunner())
    core.abort("nobody")
    assert not core.has_work


def test_drafter_state_is_dropped_with_the_request() -> None:
    drafter = ngram()
    run_all(make_core(MockRunner(), drafters=[drafter]), [make_request(range(4))])
    assert not drafter._indexes


def test_metrics_add_up() -> None:
    core = make_core(MockRunner(), drafters=[ngram()])
    outputs = run_all(core, requests_of("greedy"))
    metrics = core.metrics
    assert metrics.generated_tokens == sum(len(tokens_of(out)) for out in outputs.values())
    assert metrics.ttft.count == metrics.e2e.count == metrics.queue.count == 8
    drafting = metrics.drafters["ngram"]
    assert drafting.accepted_tokens == sum(drafting.accepted_by_position)
    assert metrics.generated_tokens == metrics.target_passes + drafting.accepted_tokens
    assert (metrics.running, metrics.waiting, metrics.kv_usage) == (0, 0, 0.0)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [0, VOCAB_SIZE]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [1] * 300}, "prompt"),
        ({"prompt": [1], "max_tokens": 300}, "max_tokens"),
        ({"prompt": [1], "logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias"),
        ({"prompt": [1], "stop_token_ids": frozenset({-1})}, "stop_token_ids"),
    ],
)
def test_requests_the_model_cannot_serve_are_refused(change: dict[str, Any], param: str) -> None:
    core = make_core(MockRunner())
    with pytest.raises(RequestError) as caught:
        core.limits.check(make_request(**change))
    assert caught.value.param == param
