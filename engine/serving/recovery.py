"""When an engine is broken (EngineBrokenError), and how often it is made anew (RestartBudget)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from engine.request import RequestOutput


class EngineBrokenError(RuntimeError):
    """The target can't compute anything any more, whoever asks.

    Attributes:
        outputs: those of the step that showed it; they end the requests that were in it.
    """

    def __init__(self, message: str, outputs: Sequence[RequestOutput] = ()) -> None:
        super().__init__(message)
        self.outputs = tuple(outputs)


class RestartBudget:
    """At most so many restarts in any stretch of time: a fault that lasts must show."""

    def __init__(
        self,
        max_restarts: int,
        window_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_restarts = max_restarts
        self._window_seconds = window_seconds
        self._clock = clock
        self._restarts: deque[float] = deque()

    def take(self) -> bool:
        """Whether one more restart is allowed; if so it counts."""
        now = self._clock()
        while self._restarts and now - self._restarts[0] > self._window_seconds:
            self._restarts.popleft()
        if len(self._restarts) >= self._max_restarts:
            return False
        self._restarts.append(now)
        return True
