"""Stop signals before uvicorn, which has its own handlers, runs."""

from __future__ import annotations

import signal
from types import FrameType


def exit_on_stop_signals() -> None:
    """Make SIGINT and SIGTERM end the process with exit code 0, wherever it is.

    A container's first process ignores SIGTERM unless it has a handler.
    """
    for stop_signal in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop_signal, _exit)


def _exit(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(0)
