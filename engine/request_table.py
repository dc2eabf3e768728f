"""RequestTable: a core's requests, from their arrival to their end."""

from __future__ import annotations

from collections.abc import Callable

from engine.accounting import Accounting, usage
from engine.draft.speculator import Speculator
from engine.preparation import Preparation
from engine.request import (
    QUEUE_TIMEOUT,
    FinishReason,
    GenerationRequest,
    RequestOutput,
    RequestTiming,
)
from engine.request_state import RequestState
from engine.sampling.grammar import Grammars
from engine.scheduling.scheduler import Scheduler
from engine.serving.step_guard import FAULTS
from engine.text.stream import TextStream
from engine.text.tokenizer import TextTokenizer
from engine.verify import Verifier

WAITED_TOO_LONG = "The server is busy: the request waited longer than it may."


class RequestTable:
    """Begins and ends requests with everyone who keeps something of them; holds their states."""

    def __init__(
        self,
        *,
        tokenizer: TextTokenizer,
        scheduler: Scheduler,
        speculator: Speculator,
        grammars: Grammars,
        verifier: Verifier,
        accounting: Accounting,
        clock: Callable[[], float],
    ) -> None:
        """
        Args:
            tokenizer: the target's.
            clock: monotonic seconds.
        """
        self._tokenizer = tokenizer
        self._scheduler = scheduler
        self._speculator = speculator
        self._grammars = grammars
        self._verifier = verifier
        self._accounting = accounting
        self._clock = clock
        self._states: dict[str, RequestState] = {}

    def __getitem__(self, request_id: str) -> RequestState:
        return self._states[request_id]

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._states

    def is_new(self, request_id: str) -> bool:
        """Whether no step has computed anything of the request."""
        return self._states[request_id].num_steps == 0

    def add(self, request: GenerationRequest, preparation: Preparation) -> None:
        """Queue a request.

        Raises:
            RequestError: the grammar can't be used.
        """
        grammar = preparation.grammar
        text = TextStream(request.params, self._tokenizer)
        matcher = None if grammar is None else self._grammars.matcher(grammar)
        state = RequestState(self._scheduler.add(request, preparation), text)
        if request.params.prompt_logprobs is not None:
            state.prompt_logprobs.append(None)
        if matcher is not None:
            self._grammars.add(request.request_id, matcher)
        self._states[request.request_id] = state

    def end(self, state: RequestState, reason: FinishReason) -> RequestTiming:
        """Forget a request and free its blocks."""
        request_id = state.request_id
        self._scheduler.finish(request_id)
        self._grammars.forget(request_id)
        self._verifier.forget(request_id)
        self._speculator.forget(request_id)
        del self._states[request_id]
        return self._accounting.note_end(state, reason, self._clock())

    def fail(self, state: RequestState, error: str, code: str | None = None) -> RequestOutput:
        """End a request that can't go on; the others don't notice."""
        if error in FAULTS:
            self._scheduler.invalidate(state.request_id)
        return RequestOutput(
            request_id=state.request_id,
            text="",
            token_ids=(),
            usage=usage(state),
            finish_reason=FinishReason.ERROR,
            error=error,
            error_code=code,
            timing=self.end(state, FinishReason.ERROR),
        )

    def fail_overdue(self, now: float) -> list[RequestOutput]:
        """End the requests that have waited longer than they may."""
        return [
            self.fail(self._states[request_id], WAITED_TOO_LONG, QUEUE_TIMEOUT)
            for request_id in self._scheduler.overdue(now)
        ]

    @property
    def waiting_ids(self) -> frozenset[str]:
        """Requests that no step is computing."""
        return frozenset(sequence.request_id for sequence in self._scheduler.waiting)

    def give_up_running(self) -> None:
        """Drop what is kept of all requests that no step can go on with; they end in an error.

        For a core that is used no more; another one can resume what waits. Idempotent.
        """
        lost = self._states.keys() - self.waiting_ids
        for request_id in lost:
            self._grammars.forget(request_id)
            del self._states[request_id]
        self._accounting.metrics.finished[FinishReason.ERROR] += len(lost)

    def resume_from(self, broken: RequestTable) -> None:
        """Go on with the waiting requests of a core that is used no more."""
        for sequence in broken._scheduler.waiting:
            request_id = sequence.request_id
            matcher = broken._grammars.of(request_id)
            if matcher is not None:
                self._grammars.add(request_id, matcher)
            self._scheduler.requeue(sequence)
            self._states[request_id] = broken._states[request_id]

    def check_integrity(self) -> None:
        """Raise RuntimeError unless scheduler, blocks and states agree."""
        self._scheduler.check_integrity()
        if not self._scheduler.has_work and self._states:
            raise RuntimeError("a finished request has left its state behind")
