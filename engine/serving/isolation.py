"""StepIsolator: runs a step's plan so that a request that makes it raise fails alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from engine.fault import ANY_FAULT
from engine.plan import Chunk, ChunkResult, StepPlan, StepResult

logger = logging.getLogger(__name__)

STEP_FAILED = "The engine failed on this request, which ended it; see the server's log."
_LOG_AGAIN_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Decided:
    """A chunk that a pass has computed, possibly without the draft it was planned with."""

    chunk: Chunk
    result: ChunkResult


@dataclass(frozen=True, slots=True)
class IsolatedStep:
    """What became of a plan, in its order."""

    decided: tuple[Decided, ...]
    num_failures: int = 0
    """Passes that raised."""
    draft_at_fault: bool = False
    """The pass raised with the drafts and did not without them."""


class StepIsolator:
    """Retries a plan in parts until what raises is told apart.

    The chunks of a plan don't depend on each other, a pass that raised has committed nothing, and
    K and V that are computed again come out the same: so any part of a plan is a valid step. The
    parts are, in turn: everything without its drafts; the requests of earlier steps and those that
    are new; halves, down to single requests. One bad request of n costs about 2 log2 n passes.
    """

    def __init__(
        self,
        attempt: Callable[[StepPlan], StepResult],
        is_new: Callable[[str], bool],
        clock: Callable[[], float],
    ) -> None:
        """
        Args:
            attempt: one pass and its verification; commits nothing, also when it raises.
            is_new: whether a request has been in no step that succeeded.
            clock: monotonic seconds.
        """
        self._attempt = attempt
        self._is_new = is_new
        self._clock = clock
        self._num_failures = 0
        self._logged_at: float | None = None

    def run(self, plan: StepPlan) -> IsolatedStep:
        """Decide every chunk; a request that can't be computed gets a result with an error."""
        self._num_failures = 0
        decided = self._try(plan.chunks)
        if decided is not None:
            return IsolatedStep(tuple(decided))
        chunks = tuple(chunk.with_draft(0) for chunk in plan.chunks)
        if plan.num_draft_tokens or len(chunks) == 1:
            decided = self._try(chunks)
        draft_at_fault = decided is not None and plan.num_draft_tokens > 0
        if decided is None:
            by_id = {d.chunk.request_id: d for d in self._split(chunks)}
            decided = [by_id[chunk.request_id] for chunk in chunks]
        return IsolatedStep(tuple(decided), self._num_failures, draft_at_fault)

    def _split(self, chunks: Sequence[Chunk]) -> Iterable[Decided]:
        """Decide chunks that have raised together, in parts."""
        if len(chunks) == 1:
            request_id = chunks[0].request_id
            logger.error("request %s makes the engine's step fail and is ended", request_id)
            yield Decided(chunks[0], ChunkResult((), error=STEP_FAILED))
            return
        for part in self._parts(chunks):
            decided = self._try(part)
            yield from self._split(part) if decided is None else decided

    def _parts(self, chunks: Sequence[Chunk]) -> tuple[Sequence[Chunk], Sequence[Chunk]]:
        new = [chunk for chunk in chunks if self._is_new(chunk.request_id)]
        if new and len(new) < len(chunks):
            return [chunk for chunk in chunks if not self._is_new(chunk.request_id)], new
        return chunks[: len(chunks) // 2], chunks[len(chunks) // 2 :]

    def _try(self, chunks: Sequence[Chunk]) -> list[Decided] | None:
        plan = StepPlan(tuple(chunks))
        try:
            result = self._attempt(plan)
        except ANY_FAULT:
            self._num_failures += 1
            self._log(plan)
            return None
        return [Decided(*pair) for pair in zip(chunks, result.chunks, strict=True)]

    def _log(self, plan: StepPlan) -> None:
        """With a traceback, but not again and again for a fault that lasts."""
        now = self._clock()
        if self._logged_at is None or now - self._logged_at >= _LOG_AGAIN_SECONDS:
            self._logged_at = now
            logger.exception("a step of %d requests failed; trying its parts", len(plan.chunks))
