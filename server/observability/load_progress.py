"""Shows how far loading is: bars on a terminal, else a line in the log every few seconds."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

from rich.console import Console
from rich.file_proxy import FileProxy
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from engine.config import LogFormat
from engine.progress import Listener, listening
from engine.progress import Progress as PhaseProgress

logger = logging.getLogger(__name__)

LINE_SECONDS = 5.0


@contextmanager
def showing_progress(log_format: LogFormat = "console") -> Iterator[None]:
    """Show the phases that begin in this thread meanwhile, on stderr."""
    if log_format == "console" and sys.stderr.isatty():
        shown = _bars(Console(stderr=True))
    else:
        shown = _lines(LINE_SECONDS)
    with shown as listener, listening(listener):
        yield


@contextmanager
def _bars(console: Console) -> Iterator[Listener]:
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("after"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    tasks: dict[tuple[str, str], TaskID] = {}

    def listen(state: PhaseProgress) -> None:
        phase = state.phase, state.subject
        if state.ended:
            if phase in tasks:
                progress.remove_task(tasks.pop(phase))
            return
        if phase not in tasks:
            tasks[phase] = progress.add_task(" ".join(phase), total=state.total)
        progress.update(tasks[phase], completed=state.done, total=state.total)

    with progress, _logging_above(console):
        yield listen


@contextmanager
def _logging_above(console: Console) -> Iterator[None]:
    """Have lines of the log printed above what a console shows live."""
    handlers = [
        handler
        for handler in logging.getLogger().handlers
        if isinstance(handler, logging.StreamHandler) and not isinstance(handler.stream, FileProxy)
    ]
    streams = [handler.stream for handler in handlers]
    try:
        for handler, stream in zip(handlers, streams, strict=True):
            handler.setStream(cast(TextIO, FileProxy(console, stream)))
        yield
    finally:
        for handler, stream in zip(handlers, streams, strict=True):
            handler.setStream(stream)


@contextmanager
def _lines(interval: float) -> Iterator[Listener]:
    current: list[tuple[PhaseProgress, float]] = []
    """The phase that goes on, if one does, and when it began."""
    over = threading.Event()

    def listen(state: PhaseProgress) -> None:
        if state.ended:
            current.clear()
        elif current:
            current[0] = state, current[0][1]
        else:
            current.append((state, time.monotonic()))

    def tell() -> None:
        while not over.wait(interval):
            for state, began in current[:1]:
                _log(state, time.monotonic() - began)

    thread = threading.Thread(target=tell, name="slipstream-progress", daemon=True)
    thread.start()
    try:
        yield listen
    finally:
        over.set()
        thread.join()


def _log(state: PhaseProgress, seconds: float) -> None:
    fields: dict[str, Any] = {
        "event": "progress",
        "phase": state.phase,
        "subject": state.subject,
        "seconds": round(seconds, 1),
    }
    how_far = f"{seconds:.0f} s so far"
    if state.total:
        share = min(1.0, state.done / state.total)
        how_far = f"{share:.0%}"
        fields |= {"done": state.done, "total": state.total, "unit": state.unit}
        if state.done:
            left = seconds / share - seconds
            how_far += f", about {left:.0f} s left"
            fields["seconds_left"] = round(left, 1)
    logger.info("%s %s: %s", state.phase, state.subject, how_far, extra={"fields": fields})
