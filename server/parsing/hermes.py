"""Tool calls as Hermes and Qwen models write them: <tool_call>{...}</tool_call>."""

from __future__ import annotations

from enum import Enum, auto

from server.parsing.call_scanner import CallScanner
from server.parsing.deltas import Delta, text_deltas
from server.parsing.tags import partial_tag_length, split_at_tag

OPEN_TAG, CLOSE_TAG = "<tool_call>", "</tool_call>"


class _State(Enum):
    TEXT = auto()
    CALL = auto()
    BEHIND = auto()
    """Past the object, up to the closing tag."""
    DONE = auto()
    """Past the last call allowed; the rest is dropped."""


class HermesParser:
    """Implements `ToolParser`. White space in front of a call is no part of the text."""

    def __init__(self, *, max_calls: int | None = None) -> None:
        """
        Args:
            max_calls: calls the client wants at most; None: any number.
        """
        self._max_calls = max_calls
        self._num_calls = 0
        self._state = _State.TEXT
        self._held = ""
        self._opening = ""
        """Tag and white space in front of a call, to be given back when it is none."""
        self._scanner = CallScanner(0)

    def feed(self, text: str) -> list[Delta]:
        self._held += text
        deltas: list[Delta] = []
        while True:
            state = self._state
            match state:
                case _State.TEXT:
                    deltas += self._read_text()
                case _State.CALL:
                    deltas += self._read_call()
                case _State.BEHIND:
                    self._read_behind()
                case _State.DONE:
                    self._held = ""
            if self._state is state:
                return deltas

    def finish(self) -> list[Delta]:
        held, self._held = self._held, ""
        if self._state is _State.CALL and not self._scanner.is_call:
            return text_deltas(self._opening + self._scanner.raw + held)
        if self._state is not _State.TEXT or (self._num_calls and held.isspace()):
            return []
        return text_deltas(held)

    def _read_text(self) -> list[Delta]:
        text, behind = split_at_tag(self._held, OPEN_TAG)
        if behind is not None:
            self._held, self._state = behind, _State.CALL
            self._scanner = CallScanner(self._num_calls)
            settled = text.rstrip()
            self._opening = text[len(settled) :] + OPEN_TAG
            return text_deltas(settled)
        keep = partial_tag_length(text, OPEN_TAG)
        settled = text[: len(text) - keep].rstrip()
        self._held = text[len(settled) :]
        return text_deltas(settled)

    def _read_call(self) -> list[Delta]:
        deltas, self._held = self._scanner.feed(self._held)
        if not self._scanner.has_ended:
            return deltas
        if self._scanner.is_call:
            self._num_calls += 1
            self._state = _State.BEHIND
            return deltas
        self._state = _State.TEXT
        return text_deltas(self._opening + self._scanner.raw)

    def _read_behind(self) -> None:
        _, behind = split_at_tag(self._held, CLOSE_TAG)
        if behind is not None:
            self._held = behind
            self._state = _State.DONE if self._num_calls == self._max_calls else _State.TEXT
        else:
            keep = partial_tag_length(self._held, CLOSE_TAG)
            self._held = self._held[len(self._held) - keep :]
