"""What the core tells about its requests and steps, by a clock that ticks once a look."""

from __future__ import annotations

from typing import Any

import pytest

from engine.draft.ngram import NgramDrafter
from engine.draft.policy import FixedPolicy
from engine.figures import EngineMetrics
from engine.request import FinishReason
from tests.engine.helpers import make_core, make_request, run_all
from tests.engine.mock_model import MockRunner

PROMPT = [1, 2, 3, 1, 2, 3, 1, 2]


class PricedPolicy(FixedPolicy):
    """Holds that decoding one request costs ten seconds, and two twenty."""

    def plain_seconds(self, rows: int) -> float:
        return 10.0 * rows


def test_last_output_tells_when_what_happened():
    core = make_core(MockRunner(), max_running=2)
    requests = [make_request(PROMPT, max_tokens=6) for _ in range(4)]
    outputs = run_all(core, requests)
    for request in requests:
        *earlier, last = outputs[request.request_id]
        assert [output.timing for output in earlier] == [None] * len(earlier)
        timing: Any = last.timing
        assert timing.arrived < timing.scheduled < timing.first_token < timing.finished
    figures = core.metrics
    timings: list[Any] = [last.timing for *_, last in outputs.values()]
    assert figures.queue.total == sum(t.scheduled - t.arrived for t in timings)
    assert figures.prefill.total == sum(t.first_token - t.scheduled for t in timings)
    assert (figures.prompt_length.total, figures.output_length.total) == (4 * len(PROMPT), 4 * 6)
    for histogram in (figures.prefill, figures.decode, figures.prompt_length):
        assert histogram.count == 4
    assert figures.tpot.total == pytest.approx(figures.decode.total / 5)


def test_request_that_never_left_the_queue_counts_no_prefill():
    core = make_core(MockRunner(), max_running=1)
    core.add(make_request(PROMPT, "runs", max_tokens=6))
    core.add(make_request(PROMPT, "waits", max_tokens=6))
    core.step()
    core.abort("waits")
    while core.has_work:
        core.step()
    assert core.metrics.finished == {FinishReason.ABORT: 1, FinishReason.LENGTH: 1}
    assert (core.metrics.e2e.count, core.metrics.prefill.count) == (2, 1)


def figures_of(num_requests: int, **options) -> EngineMetrics:
    core = make_core(MockRunner(), policy=PricedPolicy(4), **options)
    run_all(core, [make_request(PROMPT, max_tokens=9) for _ in range(num_requests)])
    return core.metrics


@pytest.mark.parametrize("num_requests", [1, 2])
def test_plain_decoding_is_reckoned_by_the_tokens_of_steps_without_a_prompt(num_requests):
    plain = figures_of(num_requests)
    drafted = figures_of(num_requests, drafters=[NgramDrafter(min_match=2, max_match=4)])
    assert drafted.drafters["ngram"].accepted_tokens > 0
    assert drafted.step.count < plain.step.count
    # The first token of each request comes from the steps that compute the prompts.
    for figures in (plain, drafted):
        assert figures.plain_decode_seconds == pytest.approx(10.0 * 8 * num_requests)
    assert 0 < drafted.decode_only_seconds < plain.decode_only_seconds
    assert plain.decode_only_seconds < plain.step.total


def test_steps_and_drafters_are_measured():
    figures = figures_of(1, drafters=[NgramDrafter(min_match=2, max_match=4)])
    rows = len(PROMPT) + figures.target_passes - 1 + figures.drafters["ngram"].draft_tokens
    assert figures.step_tokens.total == rows
    assert figures.step_tokens.count == figures.step.count
    assert figures.drafters["ngram"].seconds > 0
