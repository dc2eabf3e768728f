"""EngineCore: propose -> schedule -> execute -> verify -> commit, one step at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.admission import ModelLimits
from engine.draft.speculator import Proposal, Speculator
from engine.metrics import EngineMetrics
from engine.models.runner import ModelRunner
from engine.models.warm_up import time_passes
from engine.plan import Slice, SliceResult
from engine.request import (
    NO_ADVICE,
    DraftUsage,
    FinishReason,
    GenerationRequest,
    RequestOutput,
    SamplingDefaults,
    TokenLogprob,
    Usage,
)
from engine.sampling.grammar import Grammars
from engine.sampling.grammar_matcher import GrammarMatcher
from engine.scheduler import Scheduler
from engine.sequence import TokenSequence
from engine.text.stream import TextStream
from engine.text.tokenizer import TextTokenizer
from engine.verify import Verifier

_WARM_UP_ROWS = (1, 4, 8, 1, 16, 4, 1)


@dataclass(slots=True)
class _Lane:
    """What the core keeps beside a request's sequence until it ends."""

    sequence: TokenSequence
    text: TextStream
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    num_prediction_tokens: int = 0
    target_passes: int = 0
    drafts: dict[str, list[int]] = field(default_factory=dict)
    """Drafted and accepted tokens by drafter."""
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
        self.metrics = EngineMetrics(drafters=speculator.metrics)
        self._clock = clock
        self._verifier = Verifier(tokenizer.pieces, tokenizer.eos_ids, self.grammars)
        self._lanes: dict[str, _Lane] = {}

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def warm_up(self) -> None:
        """Make the models' first passes, before any request, and learn what they cost."""
        for rows, seconds in time_passes(self.target, _WARM_UP_ROWS):
            self.speculator.observe_step(rows, seconds)
        self.speculator.warm_up()
        self.grammars.warm_up()

    def add(self, request: GenerationRequest, matcher: GrammarMatcher | None = None) -> None:
        """Queue a request that passed `limits.check`.

        Args:
            matcher: a new one of the request's grammar, if it has one; default: made here.

        Raises:
            RequestError: the grammar can't be used.
        """
        self.grammars.add(request, matcher)
        sequence = self.scheduler.add(request)
        lane = _Lane(sequence, TextStream(request.params, self.tokenizer))
        if request.params.prompt_logprobs is not None:
            lane.prompt_logprobs.append(None)
        if request.prediction:
            lane.num_prediction_tokens = len(self.tokenizer.encode_plain(request.prediction))
        self._lanes[request.request_id] = lane

    def abort(self, request_id: str) -> None:
        """Drop a request and free its blocks; nothing happens when it has ended already."""
        if request_id in self._lanes:
            self._end(request_id, FinishReason.ABORT)

    def step(self) -> list[RequestOutput]:
        """Run one forward pass over whatever is most due; outputs of the requests it advanced."""
        started = self._clock()
        proposals = self.speculator.propose(
            self.scheduler.running, self.scheduler.num_prompt_rows_due
        )
        plan = self.scheduler.schedule(
            {request_id: p.draft.token_ids for request_id, p in proposals.items()}
        )
        self._note_queue_times(plan.slices)
        outputs = []
        if plan.slices:
            executed = self._clock()
            logits = self.target.execute(plan)
            result = self._verifier.verify(plan, self.scheduler.__getitem__, logits)
            now = self._clock()
            self.speculator.observe_step(plan.num_tokens, now - executed)
            for piece, decided in zip(plan.slices, result.slices, strict=True):
                if piece.num_draft:
                    self._record_draft(piece, decided, proposals[piece.request_id])
                output = self._commit(piece, decided, now)
                if output is not None:
                    outputs.append(output)
            self.metrics.step.observe(self._clock() - started)
        self._update_gauges()
        return outputs

    def check_integrity(self) -> None:
        """Raise RuntimeError unless scheduler, blocks and lanes agree."""
        self.scheduler.check_integrity()
        if not self.scheduler.has_work and self._lanes:
            raise RuntimeError("a finished request has left its lane behind")

    def _record_draft(self, piece: Slice, decided: SliceResult, proposal: Proposal) -> None:
        self.speculator.record(piece.request_id, proposal, piece.num_draft, decided.num_accepted)
        self.metrics.lossy_accepted_tokens += decided.num_lossy
        counts = self._lanes[piece.request_id].drafts.setdefault(proposal.drafter, [0, 0])
        counts[0] += piece.num_draft
        counts[1] += decided.num_accepted

    def _commit(self, piece: Slice, decided: SliceResult, now: float) -> RequestOutput | None:
        request_id = piece.request_id
        lane = self._lanes[request_id]
        lane.prompt_logprobs.extend(decided.prompt_logprobs)
        if decided.error is not None:
            return self._fail(lane, decided.error)
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
            usage=self._usage(lane),
            logprobs=decided.logprobs[: len(kept)],
            prompt_logprobs=tuple(lane.prompt_logprobs) if first and lane.prompt_logprobs else None,
            finish_reason=step.finish_reason,
            stop_reason=step.stop_reason,
        )
        if step.finish_reason is not None:
            self._end(request_id, step.finish_reason)
        return output

    def _fail(self, lane: _Lane, error: str) -> RequestOutput:
        """End a request that can't go on; the others don't notice."""
        request_id = lane.sequence.request_id
        output = RequestOutput(
            request_id=request_id,
            text="",
            token_ids=(),
            usage=self._usage(lane),
            finish_reason=FinishReason.ERROR,
            error=error,
        )
        self._end(request_id, FinishReason.ERROR)
        return output

    def _end(self, request_id: str, reason: FinishReason) -> None:
        self.scheduler.finish(request_id)
        self.grammars.forget(request_id)
        self._verifier.forget(request_id)
        self.speculator.forget(request_id)
        lane = self._lanes.pop(request_id)
        now = self._clock()
        self.metrics.finished[reason] += 1
        self.metrics.e2e.observe(now - lane.sequence.arrival_time)
        num_later = lane.sequence.num_output - 1
        if lane.first_token_time is not None and num_later > 0:
            self.metrics.tpot.observe((lane.last_token_time - lane.first_token_time) / num_later)

    def _usage(self, lane: _Lane) -> Usage:
        sequence = lane.sequence
        return Usage(
            prompt_tokens=sequence.num_prompt,
            completion_tokens=sequence.num_output,
            cached_tokens=sequence.num_cached,
            target_passes=lane.target_passes,
            drafts=tuple(DraftUsage(name, *counts) for name, counts in lane.drafts.items()),
            prediction_tokens=lane.num_prediction_tokens,
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
