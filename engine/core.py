"""EngineCore: propose -> schedule -> execute -> verify -> commit, one step at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from engine.accounting import Accounting, usage
from engine.draft.speculator import Proposal, Speculator
from engine.fault import ANY_FAULT
from engine.figures import EngineMetrics
from engine.models.runner import ModelRunner
from engine.models.warm_up import can_compute, time_passes
from engine.plan import Chunk, ChunkResult, StepPlan, StepResult, roll_back
from engine.preparation import Preparation
from engine.progress import reporting
from engine.request import (
    NO_ADVICE,
    FinishReason,
    GenerationRequest,
    RequestOutput,
    SamplingDefaults,
)
from engine.request_state import RequestState
from engine.request_table import RequestTable
from engine.sampling.grammar import Grammars
from engine.scheduling.scheduler import Scheduler
from engine.serving.admission import ModelLimits
from engine.serving.isolation import STEP_FAILED, Decided
from engine.serving.preparer import Preparer
from engine.serving.recovery import EngineBrokenError
from engine.serving.step_guard import StepGuard
from engine.text.tokenizer import TextTokenizer
from engine.verify import Verifier

logger = logging.getLogger(__name__)

_WARM_UP_ROWS = (1, 4, 8, 1, 16, 4, 1)


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
        self.accounting = Accounting(EngineMetrics(drafters=speculator.metrics))
        self._clock = clock
        self._verifier = Verifier(tokenizer.token_bytes, tokenizer.eos_ids, self.grammars)
        self.requests = RequestTable(
            tokenizer=tokenizer,
            scheduler=scheduler,
            speculator=speculator,
            grammars=self.grammars,
            verifier=self._verifier,
            accounting=self.accounting,
            clock=clock,
        )
        self._guard = StepGuard(
            self._execute_and_verify,
            is_new=self.requests.is_new,
            target=target,
            speculator=speculator,
            accounting=self.accounting,
            clock=clock,
        )

    def step(self) -> list[RequestOutput]:
        """Run one forward pass over whatever is most due; outputs of the requests it advanced.

        A request that makes the pass raise ends with an error; the others go on as if it had never
        been there.

        Raises:
            EngineBrokenError: the pass raises for any request.
        """
        started, scheduler = self._clock(), self.scheduler
        outputs = self.requests.fail_overdue(started)
        proposals = self.speculator.propose(scheduler.running, scheduler.num_prompt_rows_due)
        plan = scheduler.schedule({name: p.draft.token_ids for name, p in proposals.items()})
        if plan.chunks:
            self.accounting.note_queue_times(self.requests[c.request_id] for c in plan.chunks)
            decided = self._guard.run(plan, proposals)  # calls _execute_and_verify
            outputs += self._commit(decided, proposals)
            self._guard.require_working(decided, outputs, scheduler.pool)
            seconds = self._clock() - started
            self.accounting.note_step(plan, outputs, seconds, self.speculator.plain_seconds)
        self.accounting.update_gauges(scheduler)
        return outputs

    def _execute_and_verify(self, plan: StepPlan) -> StepResult:
        """One pass of the target and what it decides, of which nothing is committed yet."""
        logits = self.target.execute(plan)
        return self._verifier.verify(plan, self.scheduler.__getitem__, logits)

    def _commit(
        self, decided: Sequence[Decided], proposals: Mapping[str, Proposal]
    ) -> list[RequestOutput]:
        """Advance each request by what was decided; one where that fails ends, alone."""
        now = self._clock()
        outputs = [self._commit_chunk(d.chunk, d.result, proposals, now) for d in decided]
        return [output for output in outputs if output is not None]

    def _commit_chunk(
        self, chunk: Chunk, result: ChunkResult, proposals: Mapping[str, Proposal], now: float
    ) -> RequestOutput | None:
        request_id = chunk.request_id
        state = self.requests[request_id]
        state.num_steps += 1
        try:
            if chunk.num_draft:
                proposal, num_drafted = proposals[request_id], chunk.num_draft
                self.speculator.record(request_id, proposal, num_drafted, result.num_accepted)
                self.accounting.note_draft(state, proposal.drafter, num_drafted, result)
            return self._advance(state, chunk, result, now)
        except ANY_FAULT:
            if request_id not in self.requests:
                raise
            logger.exception("request %s can't be committed and is ended", request_id)
            return self.requests.fail(state, STEP_FAILED)

    def _advance(
        self, state: RequestState, chunk: Chunk, result: ChunkResult, now: float
    ) -> RequestOutput | None:
        """Append a chunk's tokens; there is no output before the end of the prompt."""
        state.prompt_logprobs.extend(result.prompt_logprobs)
        if result.error is not None:
            return self.requests.fail(state, result.error)
        if not result.token_ids:
            self.scheduler.commit(chunk, ())
            return None
        step = state.text.push(result.token_ids)
        kept = result.token_ids[: step.num_tokens]
        without_rejected = roll_back(chunk, min(result.num_accepted, len(kept)))
        self.scheduler.commit(without_rejected, kept)
        first = state.first_token_time is None
        self.accounting.note_tokens(state, len(kept), now)
        reason = step.finish_reason
        return RequestOutput(
            request_id=state.request_id,
            text=step.text,
            token_ids=kept,
            usage=usage(state),
            logprobs=result.logprobs[: len(kept)],
            prompt_logprobs=tuple(state.prompt_logprobs)
            if first and state.prompt_logprobs
            else None,
            finish_reason=reason,
            stop_reason=step.stop_reason,
            timing=None if reason is None else self.requests.end(state, reason),
        )

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def metrics(self) -> EngineMetrics:
        return self.accounting.metrics

    def add(self, request: GenerationRequest, preparation: Preparation | None = None) -> None:
        """Queue a request that passed `limits.check`.

        Args:
            preparation: what `preparer` made of it, so that nothing here takes long; default: it
                is made now, for callers that have nobody else to serve.

        Raises:
            RequestError: the grammar can't be used.
        """
        self.requests.add(request, preparation or self.preparer.prepare_all(request))

    def abort(self, request_id: str) -> None:
        """Drop a request and free its blocks; nothing happens when it has ended already."""
        if request_id in self.requests:
            self.requests.end(self.requests[request_id], FinishReason.ABORT)

    def warm_up(self) -> None:
        """Make the models' first passes, before any request, and learn what they cost.

        Raises:
            EngineBrokenError: the target computes no numbers.
        """
        steps = len(_WARM_UP_ROWS) + 3
        with reporting("warming up", self.model_name, steps) as progress:
            for rows, seconds in time_passes(self.target, _WARM_UP_ROWS):
                self.speculator.observe_step(rows, seconds)
                progress.advance(1)
            if not can_compute(self.target, 0):
                raise EngineBrokenError(
                    "the model computes invalid logits: its weights are damaged"
                )
            progress.advance(1)
            self.speculator.warm_up()
            progress.advance(1)
            self.grammars.warm_up()

    def resume_from(self, broken: EngineCore) -> None:
        """Go on with the waiting requests and the figures of a core that is used no more.

        When this fails, yet another core may try: figures change when all else is done.
        """
        self.requests.resume_from(broken.requests)
        self.accounting.metrics = broken.metrics
        self.speculator.metrics = broken.speculator.metrics
        self.scheduler.counters = broken.scheduler.counters
        self.accounting.update_gauges(self.scheduler)
        self.metrics.restarts += 1

    def check_integrity(self) -> None:
        """Raise RuntimeError unless scheduler, blocks and request states agree."""
        self.requests.check_integrity()
