"""What takes a while tells how far it is to whoever listens above."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Literal

Phase = Literal["downloading", "reading", "converting", "unpacking", "packing", "warming up"]
Unit = Literal["bytes", "steps"]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one phase is."""

    phase: Phase
    subject: str
    """What it is about, mostly a model's name."""
    unit: Unit
    total: int | None
    """None: nobody knows."""
    done: int = 0
    ended: bool = False
    """Also after a failure; nothing more comes of this phase."""


Listener = Callable[[Progress], None]
"""Called in whatever thread does the work, often; it must be quick and must not raise."""

_listener: ContextVar[Listener | None] = ContextVar("progress_listener", default=None)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Tell the listener of every phase that begins in this thread meanwhile."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


class Reporter:
    """Tells of one phase. Threads of the phase's own may use it one at a time."""

    def __init__(self, progress: Progress, listener: Listener) -> None:
        self._progress = progress
        self._listener = listener
        listener(progress)

    def advance(self, amount: int) -> None:
        """So much more is done."""
        self.update(self._progress.done + amount)

    def update(self, done: int, total: int | None = None) -> None:
        """So much is done in all.

        Args:
            total: if that has become known.
        """
        self._progress = replace(self._progress, done=done, total=total or self._progress.total)
        self._listener(self._progress)

    def end(self) -> None:
        self._listener(replace(self._progress, ended=True))


@contextmanager
def reporting(
    phase: Phase, subject: str, total: int | None = None, unit: Unit = "steps"
) -> Iterator[Reporter]:
    """A phase, which lasts as long as the block."""
    reporter = Reporter(Progress(phase, subject, unit, total), _listener.get() or _nobody)
    try:
        yield reporter
    finally:
        reporter.end()


def _nobody(progress: Progress) -> None:
    """Listens to nothing."""
