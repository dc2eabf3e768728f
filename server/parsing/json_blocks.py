"""Tool calls as models write them that don't know their template's form: JSON is the whole answer.

Qwen2.5-Coder puts ``{"name": ..., "arguments": {...}}`` into a fenced block, or doubles its braces
as its template's instructions do.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from enum import Enum, auto

from server.parsing.call_arguments import json_object
from server.parsing.call_scanner import CallScanner
from server.parsing.deltas import Delta, ToolCallArguments, ToolCallStart, ToolParser

_FENCE = "```"
_FENCES = (f"{_FENCE}json", _FENCE)
_MAX_SURPLUS = 2
"""Closing braces that may follow an object whose opening brace is doubled."""
_CALL_KEYS = frozenset({"id", "type", "name", "arguments", "parameters"})


class _State(Enum):
    OPENING = auto()
    """In front of a block, or in its first characters, up to the name of the tool."""
    OBJECT = auto()
    CLOSING = auto()
    """Past an object, up to where its block ends."""


class JsonBlockParser:
    """Implements `ToolParser`. Text is held back for as long as all of it can be calls."""

    def __init__(
        self,
        names: Collection[str],
        otherwise: ToolParser,
        *,
        reads_bare: bool,
        max_calls: int | None = None,
    ) -> None:
        """
        Args:
            names: the tools the model may call.
            otherwise: reads every answer that is something else.
            reads_bare: whether an object without fence or doubled braces is a call too.
            max_calls: calls the client wants at most; None: any number.
        """
        fences = (*_FENCES, "")
        self._heads = {
            f'{fence}{braces}"name":"{name}"': (bool(fence), braces == "{{")
            for fence in fences
            for braces in ("{", "{{")
            for name in names
            if fence or braces == "{{" or reads_bare
        }
        """Without white space; whether it has a fence and doubled braces."""
        self._names = names
        self._otherwise = otherwise
        self._max_calls = max_calls
        self._state = _State.OPENING
        self._is_other = False
        """Whether the answer has turned out to be no sequence of calls."""
        self._held = ""
        self._rest = ""
        """The end of what is held that has not been read yet."""
        self._scanner = CallScanner(0, names)
        self._fenced = self._doubled = False
        self._surplus = 0
        self._calls: list[tuple[str, str]] = []

    def feed(self, text: str) -> list[Delta]:
        if self._is_other:
            return self._otherwise.feed(text)
        self._held += text
        self._rest += text
        progress = None
        while progress != (self._state, len(self._rest)):
            progress = (self._state, len(self._rest))
            self._read()
        return self._give_back() if self._is_other else []

    def finish(self) -> list[Delta]:
        if self._is_other:
            return self._otherwise.finish()
        between = self._state is _State.OPENING and not self._rest.strip()
        if self._calls and (between or self._state is _State.CLOSING):
            return self._deltas()
        return [*self._give_back(), *self._otherwise.finish()]

    def _read(self) -> None:
        match self._state:
            case _State.OPENING:
                self._read_opening()
            case _State.OBJECT:
                self._read_object()
            case _State.CLOSING:
                self._read_closing()

    def _read_opening(self) -> None:
        begun = "".join(self._rest.split())
        head = next((head for head in self._heads if begun.startswith(head)), None)
        if head is None:
            if not any(head.startswith(begun) for head in self._heads):
                self._is_other = True
            return
        self._fenced, self._doubled = self._heads[head]
        self._surplus = _MAX_SURPLUS if self._doubled else 0
        start = self._rest.index("{")
        if self._doubled:
            start = self._rest.index("{", start + 1)
        self._rest = self._rest[start:]
        self._scanner = CallScanner(len(self._calls), self._names)
        self._state = _State.OBJECT

    def _read_object(self) -> None:
        _, self._rest = self._scanner.feed(self._rest)
        if not self._scanner.has_ended:
            return
        call = None if self._scanner.is_broken else self._parse(self._scanner.raw)
        if call is None:
            self._is_other = True
        else:
            self._calls.append(call)
            self._state = _State.CLOSING

    def _read_closing(self) -> None:
        rest = self._rest.lstrip()
        if not rest:
            return
        if self._surplus and rest.startswith("}"):
            self._surplus -= 1
            self._rest = rest[1:]
        elif not self._fenced:
            self._state = _State.OPENING
        elif rest.startswith(_FENCE):
            self._rest = rest.removeprefix(_FENCE)
            self._state = _State.OPENING
        elif not _FENCE.startswith(rest):
            self._is_other = True

    def _parse(self, text: str) -> tuple[str, str] | None:
        """Name and arguments of a call; None: it is none."""
        value = json_object(text)
        if value is None and self._doubled:
            value = json_object(text.replace("{{", "{").replace("}}", "}"))
        if value is None or value.get("name") not in self._names or value.keys() - _CALL_KEYS:
            return None
        arguments = value.get("arguments", value.get("parameters"))
        if isinstance(arguments, str):
            arguments = json_object(arguments)
            if arguments is None:
                return None
        if not isinstance(arguments, dict | None):
            return None
        return value["name"], json.dumps(arguments or {}, ensure_ascii=False)

    def _deltas(self) -> list[Delta]:
        deltas: list[Delta] = []
        for index, (name, arguments) in enumerate(self._calls[: self._max_calls]):
            deltas += [ToolCallStart(index, name), ToolCallArguments(index, arguments)]
        return deltas

    def _give_back(self) -> list[Delta]:
        held, self._held, self._rest = self._held, "", ""
        self._is_other = True
        return self._otherwise.feed(held)
