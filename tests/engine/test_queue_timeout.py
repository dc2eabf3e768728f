"""A request that waits longer than it may ends with an error; nobody else notices."""

from __future__ import annotations

from dataclasses import replace

from engine.request import QUEUE_TIMEOUT, FinishReason
from tests.engine.helpers import make_core, make_request, tokens_of
from tests.engine.mock_model import MockRunner


def test_overdue_requests_end_with_a_code_while_the_others_go_on() -> None:
    core = make_core(MockRunner(), max_running=1)
    core.add(make_request([1, 2], "running", max_tokens=12))
    core.step()
    core.add(replace(make_request([3], "late"), queue_timeout=10.0))  # the clock ticks a second
    core.add(make_request([4], "patient", max_tokens=2))
    outputs = [output for _ in range(40) for output in core.step()]
    (late,) = [output for output in outputs if output.request_id == "late"]
    assert (late.finish_reason, late.error_code) == (FinishReason.ERROR, QUEUE_TIMEOUT)
    assert late.error
    assert late.timing is not None
    assert late.timing.scheduled is None
    assert late.timing.finished - late.timing.arrived >= 10
    for name, count in (("running", 11), ("patient", 2)):
        own = [output for output in outputs if output.request_id == name]
        assert len(tokens_of(own)) == count
        assert own[-1].finish_reason is FinishReason.LENGTH
    assert not core.has_work
    core.check_integrity()


def test_a_request_that_has_started_is_not_ended() -> None:
    core = make_core(MockRunner())
    core.add(replace(make_request([1, 2], "quick", max_tokens=30), queue_timeout=10.0))
    outputs = [output for _ in range(60) for output in core.step()]
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert len(tokens_of(outputs)) == 30
