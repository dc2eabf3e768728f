"""Drafters that fail: how they are put aside, tried again, and told of."""

from __future__ import annotations

import logging

import pytest

from engine.draft.drafter import Draft, DraftRequest, FreeDrafter
from engine.draft.faults import DrafterFaults
from engine.draft.policy import FixedPolicy
from engine.draft.speculator import Speculator
from tests.engine.helpers import make_core, make_request, run_all, tokens_of
from tests.engine.mock_model import MockRunner
from tests.engine.test_core import ngram


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class SickDrafter(FreeDrafter):
    """Raises while it is ill; else proposes the last token once more."""

    name = "sick"

    def __init__(self) -> None:
        self.is_ill = True
        self.num_asked = 0

    def propose_one(self, request: DraftRequest) -> Draft:
        self.num_asked += 1
        if self.is_ill:
            raise OSError("the weights are gone")
        return Draft((request.sequence.token_ids[-1],))

    def forget(self, request_id: str) -> None:
        if self.is_ill:
            raise OSError("the weights are gone")


def run(core_drafters: list[SickDrafter], clock: Clock) -> tuple[Speculator, list[int]]:
    core = make_core(MockRunner(), drafters=core_drafters, drafter_clock=clock)
    return core.speculator, tokens_of(
        run_all(core, [make_request([1, 2], "a", max_tokens=40)])["a"]
    )


PLAIN = tokens_of(run_all(make_core(MockRunner()), [make_request([1, 2], "a", max_tokens=40)])["a"])


def test_drafter_that_fails_for_good_is_put_aside_and_told_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    drafter, clock = SickDrafter(), Clock()
    speculator, tokens = run([drafter], clock)
    assert tokens == PLAIN
    assert drafter.num_asked <= 3
    assert not speculator.metrics["sick"].works
    state = speculator.state()["failing"]["sick"]
    assert state["error"] == "OSError"
    assert state["retry_in_seconds"] > 0
    logged = [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]
    assert len(logged) == 2
    assert "failed; going on without" in logged[0]
    assert "put aside" in logged[1]


def test_drafter_that_recovers_is_used_again() -> None:
    drafter, clock = SickDrafter(), Clock()
    core = make_core(MockRunner(), drafters=[drafter], drafter_clock=clock)
    core.add(make_request([1, 2], "a", max_tokens=60))
    tokens = []
    for step in range(60):
        clock.now += 0.5
        drafter.is_ill = step < 20
        if step == 20:
            assert 3 < drafter.num_asked < 8
        tokens += tokens_of(core.step())
        if len(tokens) == 60:
            break
    expected = tokens_of(
        run_all(make_core(MockRunner()), [make_request([1, 2], max_tokens=60)]).popitem()[1]
    )
    assert tokens == expected
    figures = core.speculator.metrics["sick"]
    assert figures.works
    assert figures.drafts > 10
    assert core.speculator.state()["failing"] == {}


def test_rests_grow_and_end() -> None:
    clock = Clock()
    faults = DrafterFaults(["d"], clock)
    rests = []
    for _ in range(12):
        assert not faults.rests("d")
        faults.record_failure("d", RuntimeError())
        began = clock.now
        while faults.rests("d"):
            clock.now += 0.5
        rests.append(clock.now - began)
    assert rests == [0, 0, 1, 2, 4, 8, 16, 32, 60, 60, 60, 60]
    faults.record_success("d")
    assert faults.works("d")
    faults.record_failure("d", RuntimeError())
    assert not faults.rests("d"), "a single failure is no reason to rest"


def test_failing_policy_means_plain_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = FixedPolicy(5)

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    for method in ("choose", "record", "forget", "observe_step"):
        monkeypatch.setattr(policy, method, broken)
    core = make_core(MockRunner(), drafters=[ngram()], policy=policy)
    outputs = run_all(core, [make_request([1, 2], "a", max_tokens=40)])
    assert tokens_of(outputs["a"]) == PLAIN
    assert core.speculator.state()["failing"]["policy"]["error"] == "ZeroDivisionError"
