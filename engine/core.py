"""EngineCore: propose -> schedule -> execute -> verify -> commit, one step at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.admission import ModelLimits
from engine.draft.drafter import Drafter, DraftRequest
from engine.metrics import DrafterMetrics, EngineMetrics
from engine.models.runner import ModelRunner
from engine.plan import Slice, SliceResult
from engine.request import (
    FinishReason,
    GenerationRequest,
    RequestOutput,
    TokenLogprob,
    Usage,
)
from engine.scheduler import Scheduler
from engine.sequence import TokenSequence
from engine.text.stream import TextStream
from engine.text.tokenizer import TextTokenizer
from engine.verify import Verifier

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Lane:
    """What the core keeps beside a request's sequence until it ends."""

    sequence: TokenSequence
    text: TextStream
    prompt_logprobs: list[TokenLogprob | None]
    queue_time_noted: bool = False
    first_token_time: float | None = None
    last_token_time: float = 0.0


class EngineCore:
    """The synchronous engine. Used by one thread; never blocks except in the forward pass."""

    def __init__(
        self,
        *,
        model_name: str,
        target: ModelRunner,
        tokenizer: TextTokenizer,
        scheduler: Scheduler,
        drafters: Sequence[Drafter],
        draft_length: int,
        limits: ModelLimits,
        clock: Callable[[], float],
    ) -> None:
        """
        Args:
            drafters: asked in this order; the first that proposes for a request wins the step.
            draft_length: target tokens drafted a step at most.
            clock: monotonic seconds.
        """
        self.model_name = model_name
        self.target = target
        self.tokenizer = tokenizer
        self.scheduler = scheduler
        self.drafters = tuple(drafters)
        self.limits = limits
        self.metrics = EngineMetrics(drafters={d.name: DrafterMetrics() for d in drafters})
        self._draft_length = draft_length
        self._clock = clock
        self._verifier = Verifier(tokenizer.pieces, tokenizer.eos_ids)
        self._lanes: dict[str, _Lane] = {}

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(self, request: GenerationRequest) -> None:
        """Queue a request that passed `limits.check`."""
        sequence = self.scheduler.add(request)
        first = [] if request.params.prompt_logprobs is None else [None]
        self._lanes[request.request_id] = _Lane(
            sequence, TextStream(request.params, self.tokenizer), list(first)
        )

    def abort(self, request_id: str) -> None:
        """Drop a request and free its blocks; nothing happens when it has ended already."""
        if request_id in self._lanes:
            self._end(request_id, FinishReason.ABORT)

    def step(self) -> list[RequestOutput]:
        """Run one forward pass over whatever is most due; outputs of the requests it advanced."""
        started = self._clock()
        drafts, drafted_by = self._propose()
        plan = self.scheduler.schedule(drafts)
        self._note_queue_times(plan.slices)
        outputs = []
        if plan.slices:
            logits = self.target.execute(plan)
            result = self._verifier.verify(plan, self.scheduler.__getitem__, logits)
            now = self._clock()
            for piece, decided in zip(plan.slices, result.slices, strict=True):
                if piece.num_draft:
                    drafter = self.metrics.drafters[drafted_by[piece.request_id]]
                    drafter.record(piece.num_draft, decided.num_accepted)
                output = self._commit(piece, decided, now)
                if output is not None:
                    outputs.append(output)
            self.metrics.step.observe(now - started)
        self._update_gauges()
        return outputs

    def check_integrity(self) -> None:
        """Raise RuntimeError unless scheduler, blocks and lanes agree."""
        self.scheduler.check_integrity()
        if not self.scheduler.has_work and self._lanes:
            raise RuntimeError("a finished request has left its lane behind")

    def _propose(self) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
        """Drafts by request id, and the name of the drafter behind each."""
        running = self.scheduler.running
        prefilling = [s for s in running if not s.is_decoding]
        open_requests = [
            DraftRequest(s, min(self._draft_length, s.num_output_left - 1))
            for s in running
            if s.is_decoding and s.num_output_left > 1
        ]
        drafts: dict[str, tuple[int, ...]] = {}
        drafted_by: dict[str, str] = {}
        for drafter in self.drafters:
            for request, draft in zip(
                open_requests, self._ask(drafter, open_requests, prefilling), strict=True
            ):
                if draft:
                    drafts[request.sequence.request_id] = draft
                    drafted_by[request.sequence.request_id] = drafter.name
            open_requests = [r for r in open_requests if r.sequence.request_id not in drafts]
        return drafts, drafted_by

    def _ask(
        self,
        drafter: Drafter,
        requests: list[DraftRequest],
        prefilling: list[TokenSequence],
    ) -> list[tuple[int, ...]]:
        """A drafter's proposals; one that raises costs the step its drafts, nothing more."""
        try:
            if prefilling:
                drafter.prepare(prefilling)
            return drafter.propose(requests) if requests else []
        except Exception:
            logger.exception("drafter %s failed; going on without its drafts", drafter.name)
            self.metrics.drafters[drafter.name].failures += 1
            for sequence in [*prefilling, *(request.sequence for request in requests)]:
                drafter.forget(sequence.request_id)
            return [()] * len(requests)

    def _commit(self, piece: Slice, decided: SliceResult, now: float) -> RequestOutput | None:
        request_id = piece.request_id
        lane = self._lanes[request_id]
        lane.prompt_logprobs.extend(decided.prompt_logprobs)
        if not decided.token_ids:
            self.scheduler.commit(piece, (), 0)
            return None
        step = lane.text.push(decided.token_ids)
        kept = decided.token_ids[: step.num_tokens]
        self.scheduler.commit(piece, kept, min(decided.num_accepted, len(kept)))
        first = lane.first_token_time is None
        self._note_tokens(lane, len(kept), now)
        output = RequestOutput(
            request_id=request_id,
            text=step.text,
            token_ids=kept,
            usage=_usage(lane.sequence),
            logprobs=decided.logprobs[: len(kept)],
            prompt_logprobs=tuple(lane.prompt_logprobs) if first and lane.prompt_logprobs else None,
            finish_reason=step.finish_reason,
            stop_reason=step.stop_reason,
        )
        if step.finish_reason is not None:
            self._end(request_id, step.finish_reason)
        return output

    def _end(self, request_id: str, reason: FinishReason) -> None:
        self.scheduler.finish(request_id)
        self._verifier.forget(request_id)
        for drafter in self.drafters:
            drafter.forget(request_id)
        lane = self._lanes.pop(request_id)
        now = self._clock()
        self.metrics.finished[reason] += 1
        self.metrics.e2e.observe(now - lane.sequence.arrival_time)
        num_later = lane.sequence.num_output - 1
        if lane.first_token_time is not None and num_later > 0:
            self.metrics.tpot.observe((lane.last_token_time - lane.first_token_time) / num_later)

    def _note_tokens(self, lane: _Lane, count: int, now: float) -> None:
        metrics = self.metrics
        metrics.target_passes += 1
        metrics.generated_tokens += count
        if lane.first_token_time is None:
            lane.first_token_time = now
            metrics.ttft.observe(now - lane.sequence.arrival_time)
            metrics.prompt_tokens += lane.sequence.num_prompt
        else:
            metrics.inter_token.observe(now - lane.last_token_time)
        lane.last_token_time = now

    def _note_queue_times(self, slices: Sequence[Slice]) -> None:
        for piece in slices:
            lane = self._lanes[piece.request_id]
            sequence = lane.sequence
            if sequence.first_scheduled_time is not None and not lane.queue_time_noted:
                lane.queue_time_noted = True
                self.metrics.queue.observe(sequence.first_scheduled_time - sequence.arrival_time)

    def _update_gauges(self) -> None:
        scheduler, metrics = self.scheduler, self.metrics
        metrics.running = scheduler.num_running
        metrics.waiting = scheduler.num_waiting
        metrics.kv_usage = scheduler.pool.usage
        metrics.preemptions = scheduler.counters.preemptions
        metrics.prefix_queries = scheduler.counters.prefix_queries
        metrics.prefix_hits = scheduler.counters.prefix_hits


def _usage(sequence: TokenSequence) -> Usage:
    return Usage(
        prompt_tokens=sequence.num_prompt,
        completion_tokens=sequence.num_output,
        cached_tokens=sequence.num_cached,
    )
