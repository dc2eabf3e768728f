"""StepCosts: seconds of what a step with drafts is made of, from the measured passes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.draft.cost import CostModel

Floats = npt.NDArray[np.float64]

_USUAL_UNCOMPUTED = 8
"""Draft tokens behind the last step's that are part of an ordinary first draft pass."""
_FORESEEABLE_TOKENS = 128
_TOKENS_A_DRAFT = 3.0
_PASSES_BEFORE_TRUST = 3


class StepCosts:
    """The cost models of target and drafters together."""

    def __init__(self, draft_costs: Mapping[str, CostModel | None]) -> None:
        """
        Args:
            draft_costs: each drafter's cost of a pass; None for one that is free.
        """
        self._target = CostModel()
        self._drafts = dict(draft_costs)

    @property
    def drafters(self) -> Iterable[str]:
        return self._drafts

    @property
    def are_known(self) -> bool:
        """Whether enough passes of the target were observed to go by their costs."""
        return self._target.num_observed >= _PASSES_BEFORE_TRUST

    def is_free(self, drafter: str) -> bool:
        return self._drafts[drafter] is None

    def observe_target(self, rows: int, seconds: float) -> None:
        self._target.observe(rows, seconds)

    def target_seconds(self, rows: int) -> float:
        """A pass of the target."""
        return float(self._target.seconds(rows))

    def verification_seconds(self, rows: float, draft_rows: Floats) -> Floats:
        """What a target's pass of so many rows takes longer with draft rows beside them."""
        return self._target.seconds(rows + draft_rows) - self._target.seconds(rows)

    def drafting_seconds(self, drafter: str, num_drafting: int, lengths: Floats) -> Floats:
        """A request's share of the draft passes, which all requests of the drafter make together.

        The first pass also takes over the tokens of the last step, about two more rows.

        Args:
            num_drafting: requests of the drafter.
        """
        cost = self._drafts[drafter]
        if cost is None:
            return np.zeros_like(lengths)
        first, later = cost.seconds(3.0 * num_drafting), cost.seconds(float(num_drafting))
        return np.asarray((first + (lengths - 1) * later) / num_drafting)

    def prefill_seconds(
        self, drafter: str, num_uncomputed_tokens: int, num_left: int, num_running: int
    ) -> float:
        """What a draft model's prefill costs a draft, spread over those the request may yet get.

        The more requests run, the sooner drafting may stop to pay, and the price be lost.
        """
        cost = self._drafts[drafter]
        if cost is None or num_uncomputed_tokens <= _USUAL_UNCOMPUTED:
            return 0.0
        num_drafts = max(1.0, min(num_left, _FORESEEABLE_TOKENS) / _TOKENS_A_DRAFT / num_running)
        return float(cost.seconds(num_uncomputed_tokens)) / num_drafts

    def step_seconds(self, num_requests: int, lengths: Mapping[str, list[int]]) -> float:
        """A step of decoding requests.

        Args:
            lengths: by drafter, how long its drafts are.
        """
        seconds = self.target_seconds(num_requests + sum(map(sum, lengths.values())))
        for drafter, of_drafter in lengths.items():
            if of_drafter and not self.is_free(drafter):
                longest = np.asarray([float(max(of_drafter))])
                share = self.drafting_seconds(drafter, len(of_drafter), longest)
                seconds += len(of_drafter) * float(share[0])
        return seconds

    def state(self) -> dict[str, Any]:
        """Milliseconds of passes by rows, JSON types only."""
        return {
            "target_step_ms": _milliseconds(self._target),
            "draft_pass_ms": {
                name: _milliseconds(cost) for name, cost in self._drafts.items() if cost is not None
            },
        }


def _milliseconds(cost: CostModel) -> dict[str, float]:
    return {str(rows): round(1e3 * seconds, 3) for rows, seconds in cost.curve().items()}
