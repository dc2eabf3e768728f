"""Progress bars that libraries draw, told as progress instead."""

from __future__ import annotations

import io
import re
from typing import Any

from tqdm import tqdm

from engine.progress import Reporter

_COUNT = re.compile(r"(\d+)/(\d+) \[")
_TRANSFER = "Downloading bytes"
"""The hub's second bar over the same files, in what form they come through the network."""


def downloads_told_to(reporter: Reporter) -> type[tqdm[Any]]:
    """A class of bars for the hub's client, which draw nothing."""

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *arguments: Any, name: str | None = None, **options: Any) -> None:
            # The client passes `name` to bars of its own making only, in some releases to all.
            super().__init__(*arguments, **{**options, "disable": False, "file": io.StringIO()})

        def display(self, *_: Any, **__: Any) -> bool:
            if self.unit == "B" and self.desc.removesuffix(": ") != _TRANSFER:
                reporter.update(int(self.n), int(self.total or 0))
            return True

    return Bar


class BarReader(io.TextIOBase):
    """Stands in for stderr while a library draws a bar there."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter

    def write(self, text: str) -> int:
        if match := _COUNT.search(text):
            self._reporter.update(int(match[1]), int(match[2]))
        return len(text)
