"""Watchdog: notices that a step takes too long, and says where it hangs."""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from engine.fault import ANY_FAULT

logger = logging.getLogger(__name__)


class Watchdog:
    """Watches one thread's steps from a thread of its own, which only logs."""

    def __init__(self, limit: float, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            limit: seconds a step may take.
            clock: monotonic seconds.
        """
        self._limit = limit
        self._clock = clock
        self._began: float | None = None
        self._ended = threading.Event()

    @property
    def stalled_for(self) -> float | None:
        """Seconds that the step in progress has taken, if that is too long."""
        began = self._began
        taken = 0.0 if began is None else self._clock() - began
        return taken if taken > self._limit else None

    @contextmanager
    def step(self) -> Iterator[None]:
        """The watched thread is in a step."""
        self._began = self._clock()
        try:
            yield
        finally:
            self._began = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the calling thread until the block ends."""
        watcher = threading.Thread(
            target=self._watch,
            args=(threading.get_ident(),),
            name="slipstream-watchdog",
            daemon=True,
        )
        watcher.start()
        try:
            yield
        finally:
            self._ended.set()
            watcher.join()

    def _watch(self, thread_id: int) -> None:
        reported = False
        while not self._ended.wait(min(1.0, self._limit / 4)):
            stalled = self.stalled_for
            if (stalled is not None) == reported:
                continue
            reported = not reported
            try:
                _report(stalled, thread_id)
            except ANY_FAULT:
                logger.exception("the watchdog can't tell of a step that stalls")


def _report(stalled_for: float | None, thread_id: int) -> None:
    if stalled_for is None:
        logger.warning("the step that stalled has ended")
        return
    logger.error(
        "a step has taken %.1f s and goes on; the engine is here:\n%s",
        stalled_for, _stack_of(thread_id),
    )  # fmt: skip


def _stack_of(thread_id: int) -> str:
    frame = sys._current_frames().get(thread_id)
    return "".join(traceback.format_stack(frame)).rstrip() if frame else "(ended)"
