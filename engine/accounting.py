"""Accounting: turns what the core does into figures, usage and timing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from engine.figures import EngineMetrics
from engine.plan import ChunkResult, StepPlan
from engine.request import DraftUsage, FinishReason, RequestOutput, RequestTiming, Usage
from engine.request_state import RequestState
from engine.scheduling.scheduler import Scheduler


class Accounting:
    """Writes one engine's figures. Times are seconds of the core's clock."""

    def __init__(self, metrics: EngineMetrics) -> None:
        self.metrics = metrics

    def note_queue_times(self, states: Iterable[RequestState]) -> None:
        """Note of requests in a step how long they waited for their first one."""
        for state in states:
            sequence = state.sequence
            if sequence.first_scheduled_time is not None and not state.queue_time_noted:
                state.queue_time_noted = True
                self.metrics.queue.observe(sequence.first_scheduled_time - sequence.arrival_time)

    def note_draft(
        self, state: RequestState, drafter: str, num_drafted: int, result: ChunkResult
    ) -> None:
        """Note a verified draft; the speculator keeps the drafter's own figures."""
        self.metrics.lossy_accepted_tokens += result.num_lossy
        counts = state.drafts.setdefault(drafter, [0, 0])
        counts[0] += num_drafted
        counts[1] += result.num_accepted

    def note_tokens(self, state: RequestState, count: int, now: float) -> None:
        """Note the output tokens of one pass."""
        metrics = self.metrics
        state.target_passes += 1
        metrics.target_passes += 1
        metrics.generated_tokens += count
        if state.first_token_time is None:
            state.first_token_time = now
            metrics.ttft.observe(now - state.sequence.arrival_time)
            metrics.prompt_tokens += state.sequence.num_prompt
        else:
            metrics.inter_token.observe(now - state.last_token_time)
        state.last_token_time = now

    def note_end(self, state: RequestState, reason: FinishReason, now: float) -> RequestTiming:
        """Note a request's end; when what happened to it."""
        sequence, metrics = state.sequence, self.metrics
        timing = RequestTiming(
            arrived=sequence.arrival_time,
            scheduled=sequence.first_scheduled_time,
            first_token=state.first_token_time,
            finished=now,
        )
        metrics.finished[reason] += 1
        metrics.e2e.observe(timing.finished - timing.arrived)
        if timing.scheduled is not None and timing.first_token is not None:
            decode_seconds = state.last_token_time - timing.first_token
            metrics.prefill.observe(timing.first_token - timing.scheduled)
            metrics.decode.observe(decode_seconds)
            metrics.prompt_length.observe(sequence.num_prompt)
            metrics.output_length.observe(sequence.num_output)
            if sequence.num_output > 1:
                metrics.tpot.observe(decode_seconds / (sequence.num_output - 1))
        return timing

    def note_step(
        self,
        plan: StepPlan,
        outputs: Sequence[RequestOutput],
        seconds: float,
        plain_seconds: Callable[[int], float],
    ) -> None:
        """
        Args:
            seconds: what the step took, drafting included.
            plain_seconds: what a step without drafts takes that decodes so many requests.
        """
        metrics = self.metrics
        metrics.step.observe(seconds)
        metrics.step_tokens.observe(plan.num_tokens)
        num_requests = len(plan.chunks)
        if plan.num_tokens - plan.num_draft_tokens == num_requests:
            num_committed = sum(len(output.token_ids) for output in outputs)
            metrics.decode_only_seconds += seconds
            metrics.plain_decode_seconds += (
                plain_seconds(num_requests) * num_committed / num_requests
            )

    def update_gauges(self, scheduler: Scheduler) -> None:
        """Note what the scheduler holds now and has done so far."""
        metrics = self.metrics
        metrics.running = scheduler.num_running
        metrics.waiting = scheduler.num_waiting
        metrics.kv_usage = scheduler.pool.usage
        metrics.preemptions = scheduler.counters.preemptions
        metrics.prefix_queries = scheduler.counters.prefix_queries
        metrics.prefix_hits = scheduler.counters.prefix_hits


def usage(state: RequestState) -> Usage:
    """Token counts of a request so far."""
    sequence = state.sequence
    return Usage(
        prompt_tokens=sequence.num_prompt,
        completion_tokens=sequence.num_output,
        cached_tokens=sequence.num_cached,
        target_passes=state.target_passes,
        drafts=tuple(DraftUsage(name, *counts) for name, counts in state.drafts.items()),
        prediction_tokens=sequence.preparation.num_prediction_tokens,
    )
