"""Tool calls as Llama 3 models write them: the answer is {"name": ..., "parameters": ...}."""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum, auto

from server.parsing.call_scanner import CallScanner
from server.parsing.deltas import Delta, text_deltas

_PYTHON_TAG = "<|python_tag|>"
_BETWEEN_CALLS = ";, \t\r\n"


class _State(Enum):
    START = auto()
    CALL = auto()
    BETWEEN = auto()
    TEXT = auto()
    DONE = auto()
    """Past the last call allowed; the rest is dropped."""


class LlamaJsonParser:
    """Implements `ToolParser`. An answer that is no call of a known tool is text."""

    def __init__(self, names: Collection[str], *, max_calls: int | None = None) -> None:
        """
        Args:
            names: the tools the model may call.
            max_calls: calls the client wants at most; None: any number.
        """
        self._names = names
        self._max_calls = max_calls
        self._num_calls = 0
        self._state = _State.START
        self._held = ""
        self._skipped = ""
        """What stood in front of the object, to be given back when it is no call."""
        self._scanner = CallScanner(0, names)

    def feed(self, text: str) -> list[Delta]:
        self._held += text
        deltas: list[Delta] = []
        while True:
            state = self._state
            match state:
                case _State.START | _State.BETWEEN:
                    self._read_start()
                case _State.CALL:
                    deltas += self._read_call()
                case _State.TEXT:
                    deltas += self._give_back()
                case _State.DONE:
                    self._held = ""
            if self._state is state:
                return deltas

    def finish(self) -> list[Delta]:
        if self._state is _State.CALL and self._scanner.is_call:
            return []
        if self._state is _State.CALL:
            self._skipped += self._scanner.raw
        elif self._state is _State.BETWEEN and not self._held.strip(_BETWEEN_CALLS):
            return []
        return self._give_back()

    def _read_start(self) -> None:
        filler = " \t\r\n" if self._state is _State.START else _BETWEEN_CALLS
        begun = self._held.lstrip(filler)
        if begun.startswith(_PYTHON_TAG):
            begun = begun.removeprefix(_PYTHON_TAG).lstrip(filler)
        elif not begun or _PYTHON_TAG.startswith(begun):
            return
        if not begun:
            return
        if begun.startswith("{"):
            self._skipped = self._held[: len(self._held) - len(begun)]
            self._held, self._state = begun, _State.CALL
            self._scanner = CallScanner(self._num_calls, self._names)
        else:
            self._state = _State.TEXT

    def _read_call(self) -> list[Delta]:
        deltas, self._held = self._scanner.feed(self._held)
        if not self._scanner.has_ended:
            return deltas
        if self._scanner.is_call:
            self._num_calls += 1
            is_last = self._num_calls == self._max_calls or self._scanner.is_broken
            self._state = _State.DONE if is_last else _State.BETWEEN
            return deltas
        self._skipped += self._scanner.raw
        self._state = _State.TEXT
        return []

    def _give_back(self) -> list[Delta]:
        text, self._skipped, self._held = self._skipped + self._held, "", ""
        return text_deltas(text)
