"""Stop strings that may span tokens and steps."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes text through until a stop string appears; holds back what may become one."""

    def __init__(self, stops: Sequence[str], *, include_match: bool = False) -> None:
        self._stops = tuple(stops)
        self._include_match = include_match
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def push(self, text: str) -> str:
        """Text that is safe to emit; empty after a match."""
        if not self._stops:
            return text
        if self.matched is not None or not text:
            return ""
        pending = self._held + text
        found = [(pending.find(stop), -len(stop), stop) for stop in self._stops if stop in pending]
        if found:
            start, _, self.matched = min(found)
            self._held = ""
            return pending[: start + (len(self.matched) if self._include_match else 0)]
        keep = self._possible_start(pending)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep]

    def finish(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        """Length of the longest suffix of `text` with which a stop string begins."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            suffix = text[len(text) - length :]
            if any(stop.startswith(suffix) for stop in self._stops):
                return length
        return 0
