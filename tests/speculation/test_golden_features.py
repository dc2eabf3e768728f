"""Promise 1: every feature of a request gives the same answer under every drafter."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.core import EngineCore
from engine.plan import StepPlan
from engine.request import FinishReason, GenerationRequest, RequestOutput
from tests.engine.helpers import make_request, run_all, text_of, tokens_of
from tests.speculation.fakes import TextRunner
from tests.speculation.text_engine import (
    DRAFTINGS,
    ENDING,
    LETTERS,
    TARGET,
    FlakyDrafter,
    answers,
    ended_inside_draft,
    make_drafters,
    make_engine,
    make_requests,
)
from tests.tiers import slow_unless_auto

Outputs = dict[str, list[RequestOutput]]

FEATURES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.6},
    "repetition": {"repetition_penalty": 1.4},
    "all penalties": {
        "presence_penalty": -0.4,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
    },
    "logit_bias": {"logit_bias": {TARGET.encode("ab")[0]: -100.0, TARGET.encode("h")[0]: 4.0}},
    "logprobs": {"logprobs": 3},
    "prompt_logprobs": {"prompt_logprobs": 2, "logprobs": 0},
    "min_tokens": {"min_tokens": 12, "stop_token_ids": frozenset(TARGET.encode("cd"))},
}
TRUNCATIONS: dict[str, dict[str, Any]] = {
    "min_p": {"min_p": 0.1},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.8},
    "all": {"min_p": 0.02, "top_k": 9, "top_p": 0.95, "temperature": 1.3},
}
SAMPLED = {"temperature": 0.9}


def drafting_and_sampling(test: Callable[..., None]) -> Callable[..., None]:
    sampled = pytest.mark.parametrize("sampled", [{}, SAMPLED], ids=["greedy", "seeded"])
    return pytest.mark.parametrize("drafting", slow_unless_auto(DRAFTINGS))(sampled(test))


def plain(requests: Sequence[GenerationRequest], alphabet: str = LETTERS) -> Outputs:
    """Each request alone in an engine that does not speculate."""
    return {
        request.request_id: _plain_alone(pickle.dumps(request), alphabet) for request in requests
    }


@functools.cache
def _plain_alone(pickled: bytes, alphabet: str) -> list[RequestOutput]:
    request: GenerationRequest = pickle.loads(pickled)
    return run_all(make_engine("plain", alphabet), [request])[request.request_id]


def with_predictions(
    requests: Sequence[GenerationRequest], alphabet: str
) -> list[GenerationRequest]:
    """Predictions that are right but for a passage in the middle and one left out."""
    endless = [replace(request, params=replace(request.params, stop=())) for request in requests]
    predicted = []
    for request, outputs in zip(requests, plain(endless, alphabet).values(), strict=True):
        text = text_of(outputs) + "abc"
        third = len(text) // 3
        prediction = text[:third] + "ha" + text[third + 1 : 2 * third] + text[2 * third + 3 :]
        predicted.append(replace(request, prediction=prediction))
    return predicted


def check(
    drafting: str,
    requests: Sequence[GenerationRequest],
    alphabet: str = LETTERS,
    *,
    core: EngineCore | None = None,
) -> tuple[EngineCore, Outputs]:
    """Compare a whole batch under speculation with each request alone and plain."""
    expected = plain(requests, alphabet)
    core = core or make_engine(drafting, alphabet)
    outputs = run_all(core, with_predictions(requests, alphabet))
    assert answers(outputs) == answers(expected)
    return core, outputs


def accepted(core: EngineCore) -> int:
    return sum(figures.accepted_tokens for figures in core.metrics.drafters.values())


def failures(core: EngineCore) -> int:
    return sum(figures.failures for figures in core.metrics.drafters.values())


@drafting_and_sampling
@pytest.mark.parametrize("feature", FEATURES)
def test_sampling_features(feature: str, drafting: str, sampled: dict[str, Any]) -> None:
    core, _ = check(drafting, make_requests(**(sampled | FEATURES[feature])))
    assert failures(core) == 0
    assert sum(figures.draft_tokens for figures in core.metrics.drafters.values()) > 0
    if feature == "nothing":
        assert accepted(core) > 20
        assert core.metrics.target_passes < core.metrics.generated_tokens


@pytest.mark.parametrize("drafting", slow_unless_auto(DRAFTINGS))
@pytest.mark.parametrize("truncation", TRUNCATIONS)
def test_truncation(truncation: str, drafting: str) -> None:
    core, _ = check(drafting, make_requests(**(SAMPLED | TRUNCATIONS[truncation])))
    assert failures(core) == 0
    assert accepted(core) > 20


@functools.cache
def middle_of_answers(length: int) -> dict[str, str]:
    """For each request some characters of its plain greedy answer."""
    return {name: text_of(out)[17 : 17 + length] for name, out in plain(make_requests()).items()}


@pytest.mark.parametrize("drafting", slow_unless_auto(DRAFTINGS))
@pytest.mark.parametrize("include", [False, True], ids=["cut", "included"])
def test_stop_string_inside_a_draft(drafting: str, include: bool) -> None:
    num_inside = sum(len(_stopped_inside_draft(drafting, include, n)) for n in (1, 2, 3, 5))
    assert num_inside > 2


def _stopped_inside_draft(drafting: str, include: bool, length: int) -> list[str]:
    requests = [
        replace(
            request,
            params=replace(
                request.params,
                stop=(middle_of_answers(length)[request.request_id],),
                include_stop_str_in_output=include,
                logprobs=1,
            ),
        )
        for request in make_requests()
    ]
    core, outputs = check(drafting, requests)
    for request in requests:
        steps = outputs[request.request_id]
        assert steps[-1].finish_reason is FinishReason.STOP
        assert steps[-1].stop_reason == request.params.stop[0]
        assert text_of(steps).endswith(request.params.stop[0]) == include
    return ended_inside_draft(core, outputs)


@drafting_and_sampling
def test_end_of_turn_inside_a_draft(drafting: str, sampled: dict[str, Any]) -> None:
    core, outputs = check(drafting, make_requests(8, **sampled), ENDING)
    ended = {n for n, out in outputs.items() if out[-1].finish_reason is FinishReason.STOP}
    assert len(ended) >= 3
    for name in ended:
        assert tokens_of(outputs[name])[-1] in TARGET.eos_ids
        assert not set(tokens_of(outputs[name])[:-1]) & TARGET.eos_ids
    if drafting in ("model", "universal", "fixed"):
        assert ended & set(ended_inside_draft(core, outputs))


@drafting_and_sampling
def test_ignored_end_of_turn_inside_a_draft(drafting: str, sampled: dict[str, Any]) -> None:
    _, outputs = check(drafting, make_requests(8, ignore_eos=True, **sampled), ENDING)
    assert any(0 in tokens_of(out)[:-1] for out in outputs.values())


@drafting_and_sampling
@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_max_tokens_inside_a_draft(max_tokens: int, drafting: str, sampled: dict[str, Any]) -> None:
    _, outputs = check(drafting, make_requests(max_tokens=max_tokens, **sampled))
    for steps in outputs.values():
        assert len(tokens_of(steps)) == max_tokens
        assert steps[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("drafting", slow_unless_auto(DRAFTINGS))
def test_choices_of_one_request(drafting: str) -> None:
    (request,) = make_requests(1, temperature=1.2)
    choices = [
        replace(request, request_id=f"c{index}", params=request.params.for_choice(index))
        for index in range(5)
    ]
    core, outputs = check(drafting, choices)
    assert len({tuple(tokens_of(out)) for out in outputs.values()}) == 5
    assert accepted(core) > 0


@drafting_and_sampling
def test_preemption(drafting: str, sampled: dict[str, Any]) -> None:
    starved = make_engine(drafting, num_blocks=30)
    core, _ = check(drafting, make_requests(logprobs=1, **sampled), core=starved)
    assert core.metrics.preemptions > 0
    assert accepted(core) > 0


@drafting_and_sampling
def test_prefix_cache_hits(drafting: str, sampled: dict[str, Any]) -> None:
    core = make_engine(drafting)
    requests = make_requests(**sampled)
    for turn in range(3):
        again = [
            replace(request, request_id=f"{request.request_id}-{turn}") for request in requests
        ]
        _, outputs = check(drafting, again, core=core)
        cached = sum(out[-1].usage.cached_tokens for out in outputs.values())
        assert (cached > 0) == (turn > 0)


@drafting_and_sampling
def test_draft_context_shorter_than_the_targets(drafting: str, sampled: dict[str, Any]) -> None:
    core = make_engine(drafting, max_context=44)
    check(drafting, make_requests(**sampled), core=core)
    assert failures(core) == 0
    assert accepted(core) > 0


@drafting_and_sampling
def test_draft_cache_too_small_for_all(drafting: str, sampled: dict[str, Any]) -> None:
    drafters = make_drafters(drafting, LETTERS, num_blocks=24)
    core = make_engine(drafting, drafters=drafters)
    check(drafting, make_requests(**sampled), core=core)
    assert failures(core) == 0
    assert accepted(core) > 0


@drafting_and_sampling
@pytest.mark.parametrize("fault", ["once", "now and then", "for good"])
def test_drafter_that_fails_in_mid_request(
    fault: str, drafting: str, sampled: dict[str, Any]
) -> None:
    fails_at = {
        "once": lambda call: call == 3,
        "now and then": lambda call: call % 4 == 3,
        "for good": lambda call: call >= 3,
    }[fault]
    flaky = [FlakyDrafter(drafter, fails_at) for drafter in make_drafters(drafting, LETTERS)]
    core = make_engine(drafting, drafters=flaky)
    check(drafting, make_requests(**sampled), core=core)
    assert failures(core) > 0
    if fault != "for good":
        assert accepted(core) > 0


class BrokenRunner(TextRunner):
    """A draft model whose forward pass fails after a while, in the middle of a draft."""

    def execute(self, plan: StepPlan) -> torch.Tensor:
        logits = super().execute(plan)
        if self.num_passes in range(7, 10):
            raise RuntimeError("the draft model is out of memory")
        return logits


@pytest.mark.parametrize("drafting", ["model", "universal", "fixed", "auto"])
def test_draft_model_that_fails_in_mid_draft_and_recovers(drafting: str) -> None:
    core = make_engine(drafting, runner_class=BrokenRunner)
    check(drafting, make_requests(temperature=0.7), core=core)
    assert failures(core) >= 3
    assert accepted(core) > 0


@pytest.mark.parametrize("drafting", ["model", "universal"])
def test_draft_model_with_a_padded_vocabulary(drafting: str) -> None:
    """Ids that have logits but no token: at a high temperature the draft samples them."""
    core = make_engine(drafting, vocab_size=len(TARGET.token_bytes) + 400)
    check(drafting, make_requests(temperature=1.5), core=core)
    assert failures(core) == 0


def test_one_token_prompt_drafts_at_once() -> None:
    requests = [make_request(TARGET.encode("c"), "a", max_tokens=20)]
    core, _ = check("model", requests)
    assert accepted(core) > 0
