"""Pace: how fast requests have left lately; Retry-After tells it to those who are refused."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

_WINDOW = 32
"""Departures that the pace is measured over."""


class Pace:
    """Measures over the time in which somebody was present: idle hours say nothing about speed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            clock: monotonic seconds.
        """
        self._clock = clock
        self._num_present = 0
        self._busy_before = 0.0
        """Busy seconds before the present busy spell."""
        self._spell_began = 0.0
        self._departures = deque([0.0], maxlen=_WINDOW + 1)
        """When each happened, in busy seconds; the first only marks where the window begins."""

    @property
    def num_present(self) -> int:
        return self._num_present

    def enter(self) -> None:
        if not self._num_present:
            self._spell_began = self._clock()
        self._num_present += 1

    def leave(self) -> None:
        """One of those present has left."""
        now = self._busy_seconds()
        self._departures.append(now)
        self._num_present -= 1
        if not self._num_present:
            self._busy_before = now

    def seconds_for(self, departures: int) -> float:
        """How long so many departures take; the time since the last one counts as slowness.

        Before the first departure it is as if one took place now.
        """
        window = self._busy_seconds() - self._departures[0]
        return departures * window / max(1, len(self._departures) - 1)

    def _busy_seconds(self) -> float:
        spell = self._clock() - self._spell_began if self._num_present else 0.0
        return self._busy_before + spell
