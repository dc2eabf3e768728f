"""EngineCore: propose -> schedule -> execute -> verify -> commit, one step at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from engine.draft.speculator import Proposal, Speculator
from engine.fault import ANY_FAULT
from engine.figures import EngineMetrics
from engine.models.runner import ModelRunner
from engine.models.warm_up import can_compute, time_passes
from engine.plan import Chunk, ChunkResult, StepPlan, StepResult
from engine.preparation import Preparation
from engine.request import (
    NO_ADVICE,
    QUEUE_TIMEOUT,
    DraftUsage,
    FinishReason,
    GenerationRequest,
    RequestOutput,
    RequestTiming,
    SamplingDefaults,
    TokenLogprob,
    Usage,
)
from engine.sampling.grammar import Grammars
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import TokenSequence
from engine.serving.admission import ModelLimits
from engine.serving.isolation import STEP_FAILED, Decided, IsolatedStep, StepIsolator, without_draft
from engine.serving.preparer import Preparer
from engine.serving.recovery import EngineBrokenError
from engine.text.stream import TextStream
from engine.text.tokenizer import TextTokenizer
from engine.verify import INVALID_LOGITS, Verifier

logger = logging.getLogger(__name__)

WAITED_TOO_LONG = "The server is busy: the request waited longer than it may."
_FAULTS = frozenset({STEP_FAILED, INVALID_LOGITS})
"""Errors that are not of a request's own making, and may be the engine's."""
_WARM_UP_ROWS = (1, 4, 8, 1, 16, 4, 1)


@dataclass(slots=True)
class _Lane:
    """What the core keeps beside a request's sequence until it ends."""

    sequence: TokenSequence
    text: TextStream
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    target_passes: int = 0
    drafts: dict[str, list[int]] = field(default_factory=dict)
    """Drafted and accepted tokens by drafter."""
    queue_time_noted: bool = False
    num_steps: int = 0
    """Steps that computed a slice of the request."""
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
        speculator: Speculator,
        limits: ModelLimits,
        clock: Callable[[], float],
        sampling_defaults: SamplingDefaults = NO_ADVICE,
        grammars: Grammars | None = None,
    ) -> None:
        """
        Args:
            clock: monotonic seconds.
            grammars: the target's, when a drafter uses them too.
        """
        self.model_name = model_name
        self.target = target
        self.tokenizer = tokenizer
        self.scheduler = scheduler
        self.speculator = speculator
        self.limits = limits
        self.grammars = grammars or Grammars(tokenizer, target.info.vocab_size)
        self.sampling_defaults = sampling_defaults
        self.preparer = Preparer(
            tokenizer, speculator.drafters, self.grammars, scheduler.pool.block_size
        )
        self.metrics = EngineMetrics(drafters=speculator.metrics)
        self._clock = clock
        self._verifier = Verifier(tokenizer.token_bytes, tokenizer.eos_ids, self.grammars)
        self._isolator = StepIsolator(self._attempt, self._is_new, clock)
        self._lanes: dict[str, _Lane] = {}

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def warm_up(self) -> None:
        """Make the models' first passes, before any request, and learn what they cost.

        Raises:
            EngineBrokenError: the target computes no numbers.
        """
        for rows, seconds in time_passes(self.target, _WARM_UP_ROWS):
            self.speculator.observe_step(rows, seconds)
        if not can_compute(self.target, 0):
            raise EngineBrokenError("the model computes invalid logits: its weights are damaged")
        self.speculator.warm_up()
        self.grammars.warm_up()

    def add(self, request: GenerationRequest, preparation: Preparation | None = None) -> None:
        """Queue a request that passed `limits.check`.

        Args:
            preparation: what `preparer` made of it, so that nothing here takes long; default: it
                is made now, for callers that have nobody else to serve.

        Raises:
            RequestError: the grammar can't be used.
        """
        if preparation is None:
            preparation = self.preparer.prepare_all(request)
        request_id, grammar = request.request_id, preparation.grammar
        text = TextStream(request.params, self.tokenizer)
        matcher = None if grammar is None else self.grammars.matcher(grammar)
        lane = _Lane(self.scheduler.add(request, preparation), text)
        if request.params.prompt_logprobs is not None:
            lane.prompt_logprobs.append(None)
        if matcher is not None:
            self.grammars.add(request_id, matcher)
        self._lanes[request_id] = lane

    @property
    def waiting_ids(self) -> frozenset[str]:
        """Requests that no step is computing."""
        return frozenset(sequence.request_id for sequence in self.scheduler.waiting)

    def give_up_running(self) -> None:
        """Drop what is kept of all requests that no step can go on with; they end in an error.

        For a core that is used no more; what waits can be taken over from it. Idempotent.
        """
        lost = self._lanes.keys() - self.waiting_ids
        for request_id in lost:
            self.grammars.forget(request_id)
            del self._lanes[request_id]
        self.metrics.finished[FinishReason.ERROR] += len(lost)

    def take_over(self, broken: EngineCore) -> None:
        """Go on with the waiting requests and the figures of a core that is used no more.

        When this fails, yet another core may try: figures change when all else is done.
        """
        for sequence in broken.scheduler.waiting:
            request_id = sequence.request_id
            matcher = broken.grammars.of(request_id)
            if matcher is not None:
                self.grammars.add(request_id, matcher)
            self.scheduler.adopt(sequence)
            self._lanes[request_id] = broken._lanes[request_id]
        self.metrics, self.speculator.metrics = broken.metrics, broken.speculator.metrics
        self.scheduler.counters = broken.scheduler.counters
        self._update_gauges()
        self.metrics.restarts += 1

    def abort(self, request_id: str) -> None:
        """Drop a request and free its blocks; nothing happens when it has ended already."""
        if request_id in self._lanes:
            self._end(request_id, FinishReason.ABORT)

    def step(self) -> list[RequestOutput]:
        """Run one forward pass over whatever is most due; outputs of the requests it advanced.

        A request that makes the pass raise ends with an error; the others go on as if it had never
        been there.

        Raises:
            EngineBrokenError: the pass raises for any request.
        """
        started = self._clock()
        outputs = self._end_overdue(started)
        proposals = self.speculator.propose(
            self.scheduler.running, self.scheduler.num_prompt_rows_due
        )
        plan = self.scheduler.schedule(
            {request_id: p.draft.token_ids for request_id, p in proposals.items()}
        )
        self._note_queue_times(plan.chunks)
        if plan.chunks:
            executed = self._clock()
            step = self._isolator.run(plan)
            now = self._clock()
            self._note_failures(step, plan, proposals)
            if not step.num_failures:
                self.speculator.observe_step(plan.num_tokens, now - executed)
            decided = [self._without_bad_draft(d, proposals) for d in step.decided]
            concluded = [self._conclude(d, proposals, now) for d in decided]
            outputs += [output for output in concluded if output is not None]
            if all(d.result.error in _FAULTS for d in decided):
                self._require_working(outputs)
            self._note_step(plan, outputs, self._clock() - started)
        self._update_gauges()
        return outputs

    def check_integrity(self) -> None:
        """Raise RuntimeError unless scheduler, blocks and lanes agree."""
        self.scheduler.check_integrity()
        if not self.scheduler.has_work and self._lanes:
            raise RuntimeError("a finished request has left its lane behind")

    def _attempt(self, plan: StepPlan) -> StepResult:
        logits = self.target.execute(plan)
        try:
            return self._verifier.verify(plan, self.scheduler.__getitem__, logits)
        except ANY_FAULT:
            for chunk in plan.chunks:
                self._verifier.distrust(chunk.request_id)
            raise

    def _without_bad_draft(self, decided: Decided, proposals: Mapping[str, Proposal]) -> Decided:
        """A request whose logits its own draft may have spoilt is computed again without it."""
        chunk = decided.chunk
        if decided.result.error != INVALID_LOGITS or not chunk.num_draft:
            return decided
        self.speculator.record_failure({proposals[chunk.request_id].drafter})
        (again,) = self._isolator.run(StepPlan((without_draft(chunk),))).decided
        return again

    def _is_new(self, request_id: str) -> bool:
        return self._lanes[request_id].num_steps == 0

    def _note_failures(
        self, step: IsolatedStep, plan: StepPlan, proposals: Mapping[str, Proposal]
    ) -> None:
        self.metrics.step_failures += step.num_failures
        if step.draft_at_fault:
            drafted = [chunk.request_id for chunk in plan.chunks if chunk.num_draft]
            self.speculator.record_failure({proposals[r].drafter for r in drafted})

    def _require_working(self, outputs: Sequence[RequestOutput]) -> None:
        """Raise unless the target can compute a token of nobody's: then the requests were at fault.

        Call it when they have given their blocks back.
        """
        pool = self.scheduler.pool
        blocks = pool.allocate(1)
        if blocks is None:
            return
        try:
            works = can_compute(self.target, blocks[0])
        except ANY_FAULT as error:
            raise EngineBrokenError(f"{type(error).__name__}: {error}", outputs) from error
        finally:
            pool.release(blocks)
        if not works:
            raise EngineBrokenError("the model computes invalid logits", outputs)

    def _conclude(
        self, decided: Decided, proposals: Mapping[str, Proposal], now: float
    ) -> RequestOutput | None:
        """Commit a decided slice; if that fails the request ends, alone."""
        chunk = decided.chunk
        lane = self._lanes[chunk.request_id]
        lane.num_steps += 1
        try:
            if chunk.num_draft:
                self._record_draft(chunk, decided.result, proposals[chunk.request_id])
            return self._commit(chunk, decided.result, now)
        except ANY_FAULT:
            if chunk.request_id not in self._lanes:
                raise
            logger.exception("request %s can't be committed and is ended", chunk.request_id)
            return self._fail(lane, STEP_FAILED)

    def _record_draft(self, chunk: Chunk, decided: ChunkResult, proposal: Proposal) -> None:
        self.speculator.record(chunk.request_id, proposal, chunk.num_draft, decided.num_accepted)
        self.metrics.lossy_accepted_tokens += decided.num_lossy
        counts = self._lanes[chunk.request_id].drafts.setdefault(proposal.drafter, [0, 0])
        counts[0] += chunk.num_draft
        counts[1] += decided.num_accepted

    def _commit(self, chunk: Chunk, decided: ChunkResult, now: float) -> RequestOutput | None:
        request_id = chunk.request_id
        lane = self._lanes[request_id]
        lane.prompt_logprobs.extend(decided.prompt_logprobs)
        if decided.error is not None:
            return self._fail(lane, decided.error)
        if not decided.token_ids:
            self.scheduler.commit(chunk, (), 0)
            return None
        step = lane.text.push(decided.token_ids)
        kept = decided.token_ids[: step.num_tokens]
        self.scheduler.commit(chunk, kept, min(decided.num_accepted, len(kept)))
        first = lane.first_token_time is None
        self._note_tokens(lane, len(kept), now)
        reason = step.finish_reason
        return RequestOutput(
            request_id=request_id,
            text=step.text,
            token_ids=kept,
            usage=self._usage(lane),
            logprobs=decided.logprobs[: len(kept)],
            prompt_logprobs=tuple(lane.prompt_logprobs) if first and lane.prompt_logprobs else None,
            finish_reason=reason,
            stop_reason=step.stop_reason,
            timing=None if reason is None else self._end(request_id, reason),
        )

    def _end_overdue(self, now: float) -> list[RequestOutput]:
        return [
            self._fail(self._lanes[request_id], WAITED_TOO_LONG, QUEUE_TIMEOUT)
            for request_id in self.scheduler.overdue(now)
        ]

    def _fail(self, lane: _Lane, error: str, code: str | None = None) -> RequestOutput:
        """End a request that can't go on; the others don't notice."""
        request_id = lane.sequence.request_id
        if error in _FAULTS:
            self.scheduler.distrust(request_id)
        return RequestOutput(
            request_id=request_id,
            text="",
            token_ids=(),
            usage=self._usage(lane),
            finish_reason=FinishReason.ERROR,
            error=error,
            error_code=code,
            timing=self._end(request_id, FinishReason.ERROR),
        )

    def _end(self, request_id: str, reason: FinishReason) -> RequestTiming:
        self.scheduler.finish(request_id)
        self.grammars.forget(request_id)
        self._verifier.forget(request_id)
        self.speculator.forget(request_id)
        lane = self._lanes.pop(request_id)
        sequence, metrics = lane.sequence, self.metrics
        timing = RequestTiming(
            arrived=sequence.arrival_time,
            scheduled=sequence.first_scheduled_time,
            first_token=lane.first_token_time,
            finished=self._clock(),
        )
        metrics.finished[reason] += 1
        metrics.e2e.observe(timing.finished - timing.arrived)
        if timing.scheduled is not None and timing.first_token is not None:
            decode_seconds = lane.last_token_time - timing.first_token
            metrics.prefill.observe(timing.first_token - timing.scheduled)
            metrics.decode.observe(decode_seconds)
            metrics.prompt_length.observe(sequence.num_prompt)
            metrics.output_length.observe(sequence.num_output)
            if sequence.num_output > 1:
                metrics.tpot.observe(decode_seconds / (sequence.num_output - 1))
        return timing

    def _usage(self, lane: _Lane) -> Usage:
        sequence = lane.sequence
        return Usage(
            prompt_tokens=sequence.num_prompt,
            completion_tokens=sequence.num_output,
            cached_tokens=sequence.num_cached,
            target_passes=lane.target_passes,
            drafts=tuple(DraftUsage(name, *counts) for name, counts in lane.drafts.items()),
            prediction_tokens=sequence.preparation.num_prediction_tokens,
        )

    def _note_tokens(self, lane: _Lane, count: int, now: float) -> None:
        metrics = self.metrics
        lane.target_passes += 1
        metrics.target_passes += 1
        metrics.generated_tokens += count
        if lane.first_token_time is None:
            lane.first_token_time = now
            metrics.ttft.observe(now - lane.sequence.arrival_time)
            metrics.prompt_tokens += lane.sequence.num_prompt
        else:
            metrics.inter_token.observe(now - lane.last_token_time)
        lane.last_token_time = now

    def _note_step(self, plan: StepPlan, outputs: Sequence[RequestOutput], seconds: float) -> None:
        metrics = self.metrics
        metrics.step.observe(seconds)
        metrics.step_tokens.observe(plan.num_tokens)
        num_requests = len(plan.chunks)
        if plan.num_tokens - plan.num_draft_tokens == num_requests:
            num_committed = sum(len(output.token_ids) for output in outputs)
            plain_seconds = self.speculator.plain_seconds(num_requests)
            metrics.decode_only_seconds += seconds
            metrics.plain_decode_seconds += plain_seconds * num_committed / num_requests

    def _note_queue_times(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            lane = self._lanes[chunk.request_id]
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
