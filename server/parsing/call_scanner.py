"""Reads one tool call, a JSON object with a name and arguments, as it arrives."""

from __future__ import annotations

import json
from collections.abc import Collection
from enum import Enum, auto

from server.parsing.deltas import Delta, ToolCallArguments, ToolCallStart

_WHITE = " \t\r\n"
_ARGUMENT_KEYS = ("arguments", "parameters")


class _State(Enum):
    BEFORE = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    SCALAR = auto()
    STRING = auto()
    CONTAINER = auto()
    END = auto()
    BROKEN = auto()


class CallScanner:
    """Streams the arguments' own text, unchanged, from when the name is known.

    Models are not always right about JSON: what is broken behind the name leaves a call with the
    arguments as far as they came; what is broken before it is no call.
    """

    def __init__(self, index: int, names: Collection[str] | None = None) -> None:
        """
        Args:
            index: of the call within the answer.
            names: the only names a call may have; None: any.
        """
        self._index = index
        self._names = names
        self._state = _State.BEFORE
        self._key = ""
        self._token = ""
        """Text of the string, number or container being read."""
        self._depth = 0
        self._in_string = self._escaped = False
        self._name: str | None = None
        self._arguments = ""
        """Arguments that are known but not emitted yet."""
        self._has_arguments = False
        self.raw = ""
        """Everything taken so far."""

    @property
    def is_call(self) -> bool:
        return self._name is not None

    @property
    def has_ended(self) -> bool:
        """Whether the object is complete, or broken."""
        return self._state in (_State.END, _State.BROKEN)

    @property
    def is_broken(self) -> bool:
        return self._state is _State.BROKEN

    def feed(self, text: str) -> tuple[list[Delta], str]:
        """Deltas of the call, and the text behind its end or from where it is broken."""
        was_call, position = self.is_call, 0
        while position < len(text) and not self.has_ended:
            # A scalar ends with the character behind it, which is looked at once more.
            position += self._take(text[position])
        self.raw += text[:position]
        return self._deltas(was_call), text[position:]

    def _deltas(self, was_call: bool) -> list[Delta]:
        if self._name is None:
            return []
        deltas: list[Delta] = [] if was_call else [ToolCallStart(self._index, self._name)]
        arguments, self._arguments = self._arguments, ""
        if self._state is _State.END and not self._has_arguments:
            arguments = "{}"
        return [*deltas, ToolCallArguments(self._index, arguments)] if arguments else deltas

    def _take(self, character: str) -> int:
        """Take a character; returns how many were taken, 0 or 1."""
        match self._state:
            case _State.STRING:
                self._take_in_string(character)
            case _State.CONTAINER:
                return self._take_in_container(character)
            case _State.SCALAR if character in ",}" or character in _WHITE:
                self._end_value()
                return 0
            case _State.SCALAR:
                self._token += character
            case _ if character in _WHITE:
                pass
            case _State.BEFORE if character == "{":
                self._state = _State.KEY
            case _State.KEY if character == '"':
                self._key, self._token, self._state = "", character, _State.STRING
            case _State.KEY if character == ",":
                pass
            case _State.KEY if character == "}":
                self._state = _State.END if self.is_call else _State.BROKEN
            case _State.COLON if character == ":":
                self._state = _State.VALUE
            case _State.VALUE if character not in ",:}]<":
                self._begin_value(character)
            case _:
                self._state = _State.BROKEN
                return 0
        return 1

    def _begin_value(self, character: str) -> None:
        self._token = character
        self._has_arguments = self._has_arguments or self._key in _ARGUMENT_KEYS
        if character in "{[":
            self._depth, self._state = 1, _State.CONTAINER
            self._note_argument_text(character)
        else:
            self._state = _State.STRING if character == '"' else _State.SCALAR

    def _take_in_string(self, character: str) -> None:
        self._token += character
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            if self._key:
                self._end_value()
            else:
                self._end_key()

    def _take_in_container(self, character: str) -> int:
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
        elif character == '"':
            self._in_string = True
        elif character == "<":  # the end tag came too early
            self._state = _State.BROKEN
            return 0
        else:
            self._depth += (character in "{[") - (character in "}]")
        self._note_argument_text(character)
        if self._depth == 0:
            self._state = _State.KEY
        return 1

    def _note_argument_text(self, text: str) -> None:
        if self._key in _ARGUMENT_KEYS:
            self._arguments += text

    def _end_key(self) -> None:
        key = _decoded(self._token)
        # An empty key would look like none.
        self._key = key if isinstance(key, str) and key else "?"
        self._state = _State.COLON

    def _end_value(self) -> None:
        value = _decoded(self._token)
        self._state = _State.KEY
        if self._key == "name":
            if isinstance(value, str) and value and (self._names is None or value in self._names):
                self._name = value
            else:
                self._state = _State.BROKEN
        elif self._key in _ARGUMENT_KEYS:
            # Some models write the arguments as a JSON string, or null for none.
            self._note_argument_text(value if isinstance(value, str) else "{}")


def _decoded(token: str) -> object:
    """The value of a JSON string or number; None for what is none or is no text (a surrogate)."""
    try:
        value = json.loads(token, strict=False)
        str(value).encode()
    except ValueError:
        return None
    return value
