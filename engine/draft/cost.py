"""CostModel: seconds of a forward pass by its number of rows, learnt from the passes made."""

from __future__ import annotations

import bisect
import math

import numpy as np
import numpy.typing as npt

_KNOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096)
_COMMON_RATE = 0.2
_KNOT_RATE = 0.15
_LARGEST_SURPRISE = math.log(1.5)


class CostModel:
    """A curve through knots, in log space.

    A machine that is slower for a while is slower for every number of rows, so most of a surprise
    moves the whole curve; the rest moves the knots beside the observation. A knot never seen
    keeps the shape assumed at first: a pass costs what one row costs, plus a share for each row
    more. One surprise counts for a factor of 1.5 at most: a pause of the process is no news.
    """

    def __init__(self, *, first_guess_per_row: float = 0.08) -> None:
        self._log_knots = np.log(np.asarray(_KNOTS, np.float64))
        rows = np.asarray(_KNOTS, np.float64)
        self._shape = np.log1p(first_guess_per_row * (rows - 1))
        self._log_scale: float | None = None
        self.num_observed = 0

    def observe(self, rows: int, seconds: float) -> None:
        """Learn from one pass."""
        value = math.log(max(seconds, 1e-9))
        self.num_observed += 1
        if self._log_scale is None:
            self._log_scale = value - self._shape_at(rows)
            return
        surprise = value - self._log_scale - self._shape_at(rows)
        surprise = min(max(surprise, -_LARGEST_SURPRISE), _LARGEST_SURPRISE)
        self._log_scale += _COMMON_RATE * surprise
        right = min(bisect.bisect_left(_KNOTS, rows), len(_KNOTS) - 1)
        left = right if _KNOTS[right] <= rows or right == 0 else right - 1
        for knot in {left, right}:
            self._shape[knot] += _KNOT_RATE * surprise
        # More rows never cost less: keep the curve monotone around what moved.
        self._shape[right:] = np.maximum.accumulate(self._shape[right:])
        self._shape[: left + 1] = np.minimum.accumulate(self._shape[: left + 1][::-1])[::-1]

    def seconds(self, rows: float | npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Estimated seconds of a pass; 0 before anything was observed."""
        if self._log_scale is None:
            return np.zeros_like(np.asarray(rows, np.float64))
        at = np.log(np.maximum(np.asarray(rows, np.float64), 1.0))
        return np.exp(self._log_scale + np.interp(at, self._log_knots, self._shape))

    def curve(self) -> dict[int, float]:
        """Seconds by rows, for people."""
        return {rows: float(self.seconds(rows)) for rows in _KNOTS if rows <= 64}

    def _shape_at(self, rows: int) -> float:
        return float(np.interp(math.log(max(rows, 1)), self._log_knots, self._shape))
