"""Acceptance: how likely the next draft tokens of a request are right."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.draft.decision import DraftOutcome

MAX_POSITIONS = 32
_ALL_REQUESTS_DECAY = 0.995
_ONE_REQUEST_DECAY = 0.92
_ALL_REQUESTS_FADE = 0.9985
_ONE_REQUEST_FADE = 0.995
_PRIOR_WEIGHT = 3.0
_FIRST_GUESS = 0.75
_FIRST_GUESS_WEIGHT = 4.0


@dataclass(slots=True)
class _Positions:
    """Decayed counts of drafts that reached each position, and were right there."""

    reached: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(MAX_POSITIONS))
    right: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(MAX_POSITIONS))

    def record(self, num_drafted: int, num_accepted: int, decay: float) -> None:
        self.reached *= decay
        self.right *= decay
        self.reached[: min(num_accepted + 1, num_drafted)] += 1
        self.right[:num_accepted] += 1


class AcceptanceTracker:
    """Conditional acceptance by position, of one class of drafts.

    The shape over positions is learnt from all requests; a single request, which soon shows
    whether its text is easy, moves it up or down as a whole.
    """

    def __init__(self, first_guess: float = _FIRST_GUESS) -> None:
        """
        Args:
            first_guess: conditional acceptance of every position before anything is known.
        """
        self._first_guess = first_guess
        self._all = _Positions()
        self._requests: dict[str, tuple[float, float]] = {}
        self.num_drafts = 0

    def record(self, request_id: str, num_drafted: int, num_accepted: int) -> None:
        """Learn from one verified draft."""
        self.num_drafts += 1
        num_tried = min(num_accepted + 1, num_drafted)
        expected = float(self._shape()[:num_tried].sum())
        right, wanted = self._requests.get(request_id, (0.0, 0.0))
        self._requests[request_id] = (
            right * _ONE_REQUEST_DECAY + num_accepted,
            wanted * _ONE_REQUEST_DECAY + expected,
        )
        self._all.record(num_drafted, num_accepted, _ALL_REQUESTS_DECAY)

    def fade(self) -> None:
        """Let a step's worth of time pass: what was learnt slowly counts for less."""
        self._all.reached *= _ALL_REQUESTS_FADE
        self._all.right *= _ALL_REQUESTS_FADE
        for request_id, (right, wanted) in self._requests.items():
            self._requests[request_id] = (right * _ONE_REQUEST_FADE, wanted * _ONE_REQUEST_FADE)

    def forget(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def expected_accepted(self, request_id: str) -> npt.NDArray[np.float64]:
        """Expected accepted tokens of a draft of length 1, 2, ... MAX_POSITIONS."""
        right, wanted = self._requests.get(request_id, (0.0, 0.0))
        factor = (right + _PRIOR_WEIGHT) / (wanted + _PRIOR_WEIGHT)
        shape = self._shape()
        # Scale the chance of an error where acceptance is high, of success where it is low.
        chance = np.where(factor > 1.0, 1.0 - (1.0 - shape) / factor, shape * factor)
        return np.cumsum(np.cumprod(np.clip(chance, 0.01, 0.99)))

    def by_position(self) -> list[float]:
        """Conditional acceptance of the positions seen so far, over all requests."""
        seen = int((self._all.reached > 0.5).sum())
        return [round(float(rate), 3) for rate in self._shape()[:seen]]

    def _shape(self) -> npt.NDArray[np.float64]:
        """Positions with few observations lean on the one before them."""
        right, reached = self._all.right, self._all.reached
        shape = np.empty(MAX_POSITIONS)
        before = (self._first_guess, _FIRST_GUESS_WEIGHT)
        for position in range(MAX_POSITIONS):
            guess, weight = before
            rate = (right[position] + weight * guess) / (reached[position] + weight)
            shape[position] = rate
            if reached[position] < 0.5:
                shape[position:] = rate
                break
            before = (rate, _FIRST_GUESS_WEIGHT)
        return shape


class AcceptanceByClass:
    """A tracker for each drafter and acceptance class, made when the first such draft comes up."""

    def __init__(self) -> None:
        self._trackers: dict[tuple[str, int], AcceptanceTracker] = {}

    def tracker(self, drafter: str, acceptance_class: int) -> AcceptanceTracker:
        tracker = self._trackers.get((drafter, acceptance_class))
        if tracker is None:
            # Classes count up from the least likely, as lengths of matches do.
            first_guess = acceptance_class / (acceptance_class + 2) or _FIRST_GUESS
            tracker = AcceptanceTracker(first_guess)
            self._trackers[drafter, acceptance_class] = tracker
        return tracker

    def record(self, outcome: DraftOutcome) -> None:
        """Learn from one verified draft."""
        tracker = self.tracker(outcome.drafter, outcome.acceptance_class)
        tracker.record(outcome.request_id, outcome.num_drafted, outcome.num_accepted)

    def fade(self) -> None:
        for tracker in self._trackers.values():
            tracker.fade()

    def forget(self, request_id: str) -> None:
        for tracker in self._trackers.values():
            tracker.forget(request_id)

    def state(self) -> dict[str, dict[str, Any]]:
        """By drafter and class, JSON types only."""
        state: dict[str, dict[str, Any]] = {}
        for (drafter, acceptance_class), tracker in sorted(self._trackers.items()):
            state.setdefault(drafter, {})[str(acceptance_class)] = {
                "drafts": tracker.num_drafts,
                "acceptance_by_position": tracker.by_position(),
            }
        return state
