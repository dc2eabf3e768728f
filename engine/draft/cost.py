"""CostModel: seconds of a forward pass by its number of rows, learnt from the passes made."""

from __future__ import annotations

import bisect
import math

import numpy as np
import numpy.typing as npt

_KNOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096)
_SLOWEST_RATE = 0.08
_COMMON_RATE = 0.1
_LARGEST_SURPRISE = math.log(1.5)


class CostModel:
    """A curve through knots, in log space.

    The curve is a first guess of its shape (a pass costs what one row costs, and a share of that
    for each row more), a scale, and a deviation at each knot. A machine that is slower for a while
    is slower for every number of rows, so a surprise moves the scale first and the nearest knots
    by what remains; knots never seen go with their neighbours. One surprise counts for a factor
    of 1.5 at most: a pause of the process is no news.
    """

    def __init__(self, *, first_guess_per_row: float = 0.08) -> None:
        self._log_rows = np.log(np.asarray(_KNOTS, np.float64))
        self._guess = np.log1p(first_guess_per_row * (np.asarray(_KNOTS, np.float64) - 1))
        self._deviation = np.zeros(len(_KNOTS))
        self._weight = np.zeros(len(_KNOTS))
        self._curve = self._guess
        self._scale: float | None = None
        self.num_observed = 0

    def observe(self, rows: int, seconds: float) -> None:
        """Learn from one pass."""
        value = math.log(max(seconds, 1e-9))
        self.num_observed += 1
        if self._scale is None:
            self._scale = value - self._shape_at(rows)
        surprise = value - self._scale - self._shape_at(rows)
        surprise = min(max(surprise, -_LARGEST_SURPRISE), _LARGEST_SURPRISE)
        known = bool(self._share(rows) @ self._weight > 1.0)
        common = _COMMON_RATE * surprise if known else 0.0
        self._scale += common
        share = self._share(rows)
        self._weight += share
        rate = np.maximum(_SLOWEST_RATE, 1.0 / np.maximum(self._weight, 1.0))
        self._deviation += share * rate * (surprise - common)
        self._redraw()

    def seconds(self, rows: float | npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Estimated seconds of a pass; 0 before anything was observed."""
        if self._scale is None:
            return np.zeros_like(np.asarray(rows, np.float64))
        at = np.log(np.maximum(np.asarray(rows, np.float64), 1.0))
        return np.exp(self._scale + np.interp(at, self._log_rows, self._curve))

    def curve(self) -> dict[int, float]:
        """Seconds by rows, for people."""
        return {rows: float(self.seconds(rows)) for rows in _KNOTS if rows <= 64}

    def _redraw(self) -> None:
        seen = self._weight > 0
        deviation = np.interp(self._log_rows, self._log_rows[seen], self._deviation[seen])
        # More rows never cost less.
        self._curve = np.maximum.accumulate(self._guess + deviation)

    def _share(self, rows: int) -> npt.NDArray[np.float64]:
        """How an observation at `rows` is split between the knots beside it."""
        share = np.zeros(len(_KNOTS))
        right = min(bisect.bisect_left(_KNOTS, rows), len(_KNOTS) - 1)
        left = right if _KNOTS[right] <= rows or right == 0 else right - 1
        if left == right:
            share[right] = 1.0
        else:
            width = self._log_rows[right] - self._log_rows[left]
            share[right] = (math.log(rows) - self._log_rows[left]) / width
            share[left] = 1.0 - share[right]
        return share

    def _shape_at(self, rows: int) -> float:
        return float(np.interp(math.log(max(rows, 1)), self._log_rows, self._curve))
