"""StepGuard: executes and verifies a step so that a fault costs nobody but who brings it about."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from engine.accounting import Accounting
from engine.draft.speculator import Proposal, Speculator
from engine.fault import ANY_FAULT
from engine.models.runner import ModelRunner
from engine.models.warm_up import can_compute
from engine.plan import StepPlan, StepResult
from engine.request import RequestOutput
from engine.scheduling.blocks import BlockPool
from engine.serving.isolation import STEP_FAILED, Decided, StepIsolator
from engine.serving.recovery import EngineBrokenError
from engine.verify import INVALID_LOGITS

FAULTS = frozenset({STEP_FAILED, INVALID_LOGITS})
"""Errors that are not of a request's own making, and may be the engine's."""


class StepGuard:
    """Gets a plan executed and verified whatever its requests and their drafts do.

    A request that makes a pass raise ends with an error, alone; a draft that does, or that spoils
    its request's logits, is left out and counts against its drafter.
    """

    def __init__(
        self,
        execute_and_verify: Callable[[StepPlan], StepResult],
        *,
        is_new: Callable[[str], bool],
        target: ModelRunner,
        speculator: Speculator,
        accounting: Accounting,
        clock: Callable[[], float],
    ) -> None:
        """
        Args:
            execute_and_verify: one pass; commits nothing, also when it raises.
            is_new: whether a request has been in no step that succeeded.
            clock: monotonic seconds.
        """
        self._target = target
        self._speculator = speculator
        self._accounting = accounting
        self._clock = clock
        self._isolator = StepIsolator(execute_and_verify, is_new, clock)

    def run(self, plan: StepPlan, proposals: Mapping[str, Proposal]) -> list[Decided]:
        """Execute and verify a plan; a request that can't be computed gets a result with an error.

        Args:
            proposals: where the plan's drafts come from, by request id.
        """
        began = self._clock()
        step = self._isolator.run(plan)
        seconds = self._clock() - began
        self._accounting.metrics.step_failures += step.num_failures
        if step.draft_at_fault:
            drafted = [chunk.request_id for chunk in plan.chunks if chunk.num_draft]
            self._speculator.record_failure(
                {proposals[request_id].drafter for request_id in drafted}
            )
        if not step.num_failures:
            self._speculator.observe_step(plan.num_tokens, seconds)
        return [self._without_bad_draft(decided, proposals) for decided in step.decided]

    def require_working(
        self, decided: Sequence[Decided], outputs: Sequence[RequestOutput], pool: BlockPool
    ) -> None:
        """Raise if a step gave nothing but faults and the target can't compute anybody's token.

        If it can, the requests were at fault. Call it when they have given their blocks back.

        Args:
            outputs: the step's; they go with the error.
            pool: the target's.

        Raises:
            EngineBrokenError: it can't.
        """
        if any(d.result.error not in FAULTS for d in decided):
            return
        blocks = pool.allocate(1)
        if blocks is None:
            return
        try:
            works = can_compute(self._target, blocks[0])
        except ANY_FAULT as error:
            raise EngineBrokenError(f"{type(error).__name__}: {error}", outputs) from error
        finally:
            pool.release(blocks)
        if not works:
            raise EngineBrokenError("the model computes invalid logits", outputs)

    def _without_bad_draft(self, decided: Decided, proposals: Mapping[str, Proposal]) -> Decided:
        """A request whose logits its own draft may have spoilt is computed again without it."""
        chunk = decided.chunk
        if decided.result.error != INVALID_LOGITS or not chunk.num_draft:
            return decided
        self._speculator.record_failure({proposals[chunk.request_id].drafter})
        (again,) = self._isolator.run(StepPlan((chunk.with_draft(0),))).decided
        return again
