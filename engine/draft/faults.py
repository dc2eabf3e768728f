"""Keeps a drafter that goes on failing out of the steps, and tries it again now and then."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

FAILURES_BEFORE_REST = 3
_FIRST_REST = 1.0
_LONGEST_REST = 60.0
_LOG_AGAIN_SECONDS = 60.0


@dataclass(slots=True)
class _Fault:
    failures: int = 0
    """In a row; a draft that was verified ends the row."""
    error: str = ""
    retry_at: float = -math.inf
    logged_at: float = -math.inf


class DrafterFaults:
    """A circuit breaker for each drafter: after a few failures in a row it rests, ever longer."""

    def __init__(self, drafters: Iterable[str], clock: Callable[[], float]) -> None:
        """
        Args:
            clock: monotonic seconds.
        """
        self._faults = {name: _Fault() for name in drafters}
        self._clock = clock

    def rests(self, drafter: str) -> bool:
        """Whether the drafter must not be asked now."""
        return self._clock() < self._faults[drafter].retry_at

    def works(self, drafter: str) -> bool:
        """False from a rest on until a draft has been verified again."""
        return self._faults[drafter].failures < FAILURES_BEFORE_REST

    def record_failure(self, drafter: str, error: BaseException) -> None:
        """Count a failure; one that comes while the drafter rests makes the rest no longer."""
        fault, now = self._faults[drafter], self._clock()
        if now < fault.retry_at:
            return
        fault.failures += 1
        fault.error = type(error).__name__
        if now - fault.logged_at >= _LOG_AGAIN_SECONDS and self.works(drafter):
            fault.logged_at = now
            logger.error("drafter %s failed; going on without its drafts", drafter, exc_info=error)
        num_rests = fault.failures - FAILURES_BEFORE_REST
        if num_rests >= 0:
            fault.retry_at = now + min(_LONGEST_REST, _FIRST_REST * 2.0 ** min(num_rests, 30))
        if num_rests == 0:
            logger.error(
                "drafter %s failed %d times in a row (%s) and is put aside; it will be tried again",
                drafter, fault.failures, fault.error,
            )  # fmt: skip

    def record_success(self, drafter: str) -> None:
        """A draft of the drafter has been verified."""
        fault = self._faults[drafter]
        if not self.works(drafter):
            logger.info("drafter %s drafts again", drafter)
        fault.failures, fault.retry_at = 0, -math.inf

    def state(self) -> dict[str, dict[str, Any]]:
        """The drafters that don't work, JSON types only."""
        return {
            name: {
                "failures_in_a_row": fault.failures,
                "error": fault.error,
                "retry_in_seconds": round(max(0.0, fault.retry_at - self._clock()), 1),
            }
            for name, fault in self._faults.items()
            if not self.works(name)
        }
