"""Steps that raise: who pays for it, and that nobody else notices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from engine.core import EngineCore
from engine.draft.drafter import Draft, Drafter, DraftRequest
from engine.plan import StepPlan
from engine.request import FinishReason, GenerationRequest, RequestOutput
from engine.serving.isolation import STEP_FAILED
from engine.serving.recovery import EngineBrokenError
from tests.engine.helpers import make_core, make_request, run_all, text_of, tokens_of
from tests.engine.mock_model import VOCAB_SIZE, MockRunner
from tests.engine.test_core import OracleDrafter, ngram, plain_answers, requests_of, tokenizer

Fault = Callable[[StepPlan, int], bool]
"""Whether the pass of a plan raises, given the number of passes so far."""


class FaultyRunner(MockRunner):
    """Raises where a fault says so, before its K and V are written or afterwards."""

    def __init__(self, fault: Fault, *, num_blocks: int = 128, late: bool = False) -> None:
        super().__init__(num_blocks)
        self.fault = fault
        self._late = late
        self.num_calls = 0

    def execute(self, plan: StepPlan) -> torch.Tensor:
        self.num_calls += 1
        raises = self.fault(plan, self.num_calls)
        if raises and not self._late:
            raise RuntimeError("no such luck")
        logits = super().execute(plan)
        if raises:
            raise RuntimeError("no such luck")
        return logits


def holds(request_id: str, since: int = 0) -> Fault:
    """The pass raises that computes a request's positions from `since` on."""

    def fault(plan: StepPlan, num_calls: int) -> bool:
        return any(s.request_id == request_id and s.end > since for s in plan.chunks)

    return fault


def drafters_for(drafting: str, requests: tuple[GenerationRequest, ...]) -> list[Drafter]:
    truth = {name: tokens_of(outputs) for name, outputs in plain_answers(requests).items()}
    drafters: dict[str, list[Drafter]] = {
        "none": [],
        "ngram": [ngram()],
        "oracle": [OracleDrafter(truth, 5)],
    }
    return drafters[drafting]


def check_untouched(
    outputs: dict[str, list[RequestOutput]], requests: tuple[GenerationRequest, ...]
) -> None:
    """Every request has what it would have had on its own."""
    expected = plain_answers(requests)
    for name, steps in outputs.items():
        assert tokens_of(steps) == tokens_of(expected[name]), name
        assert text_of(steps) == text_of(expected[name])
        assert steps[-1].finish_reason == expected[name][-1].finish_reason
        assert [p for step in steps for p in step.logprobs] == [
            p for step in expected[name] for p in step.logprobs
        ]


def check_ended(steps: list[RequestOutput]) -> None:
    assert steps[-1].finish_reason is FinishReason.ERROR
    assert steps[-1].error == STEP_FAILED


@pytest.mark.parametrize("kind", ["greedy", "sampled", "repetition", "logprobs"])
@pytest.mark.parametrize("drafting", ["none", "ngram", "oracle"])
@pytest.mark.parametrize("since", [0, 17, 20])
@pytest.mark.parametrize("late", [False, True])
def test_only_the_request_that_makes_steps_raise_fails(
    kind: str, drafting: str, since: int, late: bool
) -> None:
    requests = requests_of(kind)
    bad = requests[3].request_id
    runner = FaultyRunner(holds(bad, since), late=late)
    drafters = drafters_for(drafting, requests)
    core = make_core(runner, drafters=drafters, tokenizer=tokenizer())
    outputs = run_all(core, requests)
    check_ended(outputs.pop(bad))
    check_untouched(outputs, requests)
    assert core.scheduler.pool.num_free == runner.num_blocks
    assert core.metrics.step_failures > 0
    assert core.metrics.finished[FinishReason.ERROR] == 1


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
@pytest.mark.parametrize("drafting", ["none", "oracle"])
def test_preempted_requests_survive_a_bad_one(kind: str, drafting: str) -> None:
    requests = requests_of(kind)
    bad = requests[2].request_id
    runner = FaultyRunner(holds(bad, since=15), num_blocks=26)
    core = make_core(runner, drafters=drafters_for(drafting, requests), tokenizer=tokenizer())
    outputs = run_all(core, requests)
    check_ended(outputs.pop(bad))
    check_untouched(outputs, requests)
    assert core.metrics.preemptions > 0


@pytest.mark.parametrize("kind", ["sampled", "repetition"])
@pytest.mark.parametrize("drafting", ["none", "ngram", "oracle"])
@pytest.mark.parametrize("period", [3, 5])
def test_nobody_fails_by_a_fault_that_passes(kind: str, drafting: str, period: int) -> None:
    requests = requests_of(kind)
    runner = FaultyRunner(lambda _, num_calls: num_calls % period == 0, late=True)
    core = make_core(runner, drafters=drafters_for(drafting, requests), tokenizer=tokenizer())
    check_untouched(run_all(core, requests), requests)
    assert core.metrics.step_failures >= 2
    assert core.metrics.finished[FinishReason.ERROR] == 0


def test_requests_that_only_clash_together_all_get_through() -> None:
    requests = requests_of("sampled")
    clash = {requests[1].request_id, requests[6].request_id}
    runner = FaultyRunner(lambda plan, _: clash <= {s.request_id for s in plan.chunks})
    core = make_core(runner, tokenizer=tokenizer())
    check_untouched(run_all(core, requests), requests)
    assert core.metrics.step_failures > 0


def test_newcomer_at_fault_costs_two_more_passes() -> None:
    requests = tuple(make_request(range(3 + i), f"r{i}", max_tokens=30) for i in range(4))
    runner = FaultyRunner(holds("bad"))
    core = make_core(runner)
    for request in requests:
        core.add(request)
    for _ in range(3):
        core.step()
    core.add(make_request([7, 8], "bad"))
    before = runner.num_calls
    outputs = core.step()
    assert {o.request_id for o in outputs if o.finish_reason} == {"bad"}
    assert len(outputs) == 5
    assert runner.num_calls - before == 3


def test_one_of_64_is_found_in_a_logarithm_of_passes() -> None:
    requests = [make_request([i, 1], f"r{i}", max_tokens=9) for i in range(64)]
    runner = FaultyRunner(lambda plan, _: False, num_blocks=300)
    core = make_core(
        runner, max_running=64, max_step_tokens=256, prefill_chunk=128, tokenizer=tokenizer()
    )
    for request in requests:
        core.add(request)
    core.step()
    runner.fault = holds("r41")
    before = runner.num_calls
    assert [o.request_id for o in core.step() if o.finish_reason] == ["r41"]
    assert runner.num_calls - before <= 1 + 2 * 6


class HarmfulDrafter(OracleDrafter):
    """Proposes a token that the target has no embedding for."""

    name = "harmful"

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [Draft((VOCAB_SIZE + 5,)) for _ in requests]


@pytest.mark.parametrize("kind", ["greedy", "sampled", "repetition"])
def test_draft_that_the_target_cannot_compute_costs_the_draft_alone(kind: str) -> None:
    requests = requests_of(kind)
    runner = FaultyRunner(lambda plan, _: any(max(s.token_ids) >= VOCAB_SIZE for s in plan.chunks))
    core = make_core(runner, drafters=[HarmfulDrafter({}, 1)], tokenizer=tokenizer())
    check_untouched(run_all(core, requests), requests)
    figures = core.metrics.drafters["harmful"]
    assert figures.failures == 3, "then it rests"
    assert not figures.works
    assert core.metrics.step_failures == 3


def fail_verification(core: EngineCore, bad: str) -> None:
    """Verification raises for one request, when it has dealt with those before it."""
    sample = core._verifier._sample

    def failing(layout: Any, *others: Any) -> Any:
        tokens = sample(layout, *others)
        if any(rows.sequence.request_id == bad for rows in layout):
            raise ValueError("this can't be verified")
        return tokens

    core._verifier._sample = failing  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize("drafting", ["none", "oracle"])
@pytest.mark.parametrize("kind", ["sampled", "repetition"])
def test_verification_that_raises_leaves_no_trace(kind: str, drafting: str) -> None:
    requests = requests_of(kind)
    core = make_core(
        MockRunner(128), drafters=drafters_for(drafting, requests), tokenizer=tokenizer()
    )
    bad = requests[4].request_id
    fail_verification(core, bad)
    outputs = run_all(core, requests)
    check_ended(outputs.pop(bad))
    check_untouched(outputs, requests)


def test_penalties_interrupted_in_a_draft_forget_the_draft(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from engine.sampling.processors import TokenHistory

    requests = requests_of("repetition")
    core = make_core(
        MockRunner(128), drafters=drafters_for("oracle", requests), tokenizer=tokenizer()
    )
    penalize, calls = TokenHistory.penalize, iter(range(10**9))

    def interrupted(
        self: TokenHistory, logits: torch.Tensor, params: Any, draft: list[int]
    ) -> None:
        if draft and next(calls) % 4 == 3:
            self._add(draft, 1.0)
            raise MemoryError
        penalize(self, logits, params, draft)

    monkeypatch.setattr(TokenHistory, "penalize", interrupted)
    check_untouched(run_all(core, requests), requests)
    assert core.metrics.step_failures > 0


def test_commit_that_raises_ends_its_request_alone() -> None:
    requests = requests_of("sampled")
    core = make_core(MockRunner(128), tokenizer=tokenizer())
    add = core.add

    def add_spoilt(request: GenerationRequest) -> None:
        add(request)
        if request is requests[5]:
            core.requests[request.request_id].text._detokenizer = None  # type: ignore[assignment]

    core.add = add_spoilt  # type: ignore[method-assign, assignment]
    outputs = run_all(core, requests)
    check_ended(outputs.pop(requests[5].request_id))
    check_untouched(outputs, requests)


def test_a_lone_bad_request_is_told_from_a_broken_engine() -> None:
    core = make_core(FaultyRunner(holds("bad")))
    outputs = run_all(core, [make_request([1, 2], "bad")])
    check_ended(outputs["bad"])
    assert tokens_of(run_all(core, [make_request([1, 2], "good")])["good"])


def test_broken_engine_is_told_with_the_errors_of_its_requests() -> None:
    core = make_core(FaultyRunner(lambda _, num_calls: num_calls > 4))
    for name in ("a", "b"):
        core.add(make_request([1, 2], name, max_tokens=50))
    for _ in range(4):
        core.step()
    with pytest.raises(EngineBrokenError, match="no such luck") as caught:
        core.step()
    assert {(o.request_id, o.error) for o in caught.value.outputs} == {
        ("a", STEP_FAILED),
        ("b", STEP_FAILED),
    }
    core.check_integrity()
    assert not core.has_work


def test_a_lasting_fault_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    requests = requests_of("greedy")
    clash = {requests[0].request_id, requests[1].request_id}
    core = make_core(
        FaultyRunner(lambda plan, _: clash <= {s.request_id for s in plan.chunks}),
        tokenizer=tokenizer(),
    )
    core._guard._isolator._clock = lambda: 0.0
    run_all(core, requests)
    assert core.metrics.step_failures > 5
    assert len([r for r in caplog.records if r.exc_info]) == 1
