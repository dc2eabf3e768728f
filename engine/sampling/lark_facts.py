"""Reads a Lark grammar for what must be known before llguidance may compile it.

Whether every rule can come to an end: llguidance reads ahead as long as only one byte can come
next. In a rule that never ends, such as ``a: "x" a``, it may read ahead for ever, in a thread that
nothing can stop. Where every rule has an end this can't happen: the only way on would lead there.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

_TOKEN = re.compile(
    r"""
    (?P<blank>[ \t\r]+|\#[^\n]*|//[^\n]*)
    | (?P<newline>\n)
    | (?P<literal>"(?:\\.|[^"\\])*"i?|/(?:\\.|[^/\\])+/[imslux]*|<[^<>\s]+>)
    | (?P<repeat>\{\s*(?P<fewest>\d*)\s*(?:,\s*\d*\s*)?\})
    | (?P<range>~\s*(?P<least>\d+)(?:\s*\.\.\s*\d+)?)
    | (?P<directive>%[a-z]+)
    | (?P<alias>->\s*[\w-]+)
    | (?P<rule>_?[a-z][_a-z0-9-]*)
    | (?P<terminal>_?[A-Z][_A-Z0-9]*)
    | (?P<sign>\.\.|[()\[\]|:*?+!&~,=.]|\d+)
    """,
    re.VERBOSE | re.DOTALL,
)
_WITH_JSON = frozenset({"%json", "%regex", "%llguidance"})
_TO_THE_LINES_END = frozenset({"%ignore", "%import", "%declare"})
_STATEMENTS = _TO_THE_LINES_END | {"%llguidance"}
"""Which are no part of a rule."""


class LarkError(ValueError):
    """The grammar has something in it that can't be judged; the message says what."""


@dataclass(frozen=True, slots=True)
class LarkFacts:
    endless_rules: list[str]
    """Names of the rules that no text can complete."""
    schemas: list[Any]
    """JSON schemas that stand in it."""


@dataclass(slots=True)
class _Body:
    """A rule or a group: alternatives, each with the rules and groups that it can't do without."""

    name: str
    alternatives: list[list[str]] = field(default_factory=lambda: [[]])
    is_optional: bool = False
    is_rule: bool = False

    def add(self, reference: str) -> None:
        self.alternatives[-1].append(reference)


def read_lark(text: str) -> LarkFacts:
    """Judge a grammar. What is wrong with it otherwise is left to llguidance to say.

    Raises:
        LarkError: the grammar can't be judged.
    """
    reader = _Reader(text)
    bodies = reader.read()
    complete = _completable(bodies)
    endless = [body.name for body in bodies if body.is_rule and body.name not in complete]
    return LarkFacts(endless, reader.schemas)


def _completable(bodies: Sequence[_Body]) -> set[str]:
    """The least set of bodies with an alternative whose parts are all in it, or don't exist."""
    users: defaultdict[str, list[tuple[str, set[str]]]] = defaultdict(list)
    known = {body.name for body in bodies}
    ready = []
    for body in bodies:
        for alternative in body.alternatives:
            missing = known.intersection(alternative)
            if not missing:
                ready.append(body.name)
            for part in missing:
                users[part].append((body.name, missing))
    complete: set[str] = set()
    while ready:
        name = ready.pop()
        if name in complete:
            continue
        complete.add(name)
        for user, missing in users[name]:
            missing.discard(name)
            if not missing:
                ready.append(user)
    return complete


class _Reader:
    """Reads rules without recursion: clients nest as deeply as their limits let them."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.schemas: list[Any] = []
        self._bodies: list[_Body] = []
        self._open: list[_Body] = []
        """The body that is read, behind those around it."""
        self._last: str | None = None
        """What a sign of repetition would be about: a rule or group; None: something that ends."""

    def read(self) -> list[_Body]:
        at_line_start, in_head = True, False
        for kind, word in self._tokens():
            if kind == "newline":
                at_line_start = True
                continue
            if in_head:  # the attributes of a rule
                in_head = word != ":"
            elif at_line_start and len(self._open) <= 1 and word in ("?", "!"):
                continue
            elif at_line_start and len(self._open) <= 1 and kind in ("rule", "terminal"):
                self._begin(word)
                in_head = True
            elif not self._open:
                raise LarkError(f"{word[:20]!r} stands outside of a rule")
            else:
                self._take(kind, word)
            at_line_start = False
        if len(self._open) > 1:
            raise LarkError("a parenthesis is not closed")
        return self._bodies

    def _tokens(self) -> Iterator[tuple[str, str]]:
        """Kind and text of each; a repetition that may be none has the text ``?``."""
        place = 0
        while place < len(self._text):
            match = _TOKEN.match(self._text, place)
            if match is None:
                raise LarkError(f"{self._text[place : place + 20]!r} is not supported")
            place = match.end()
            kind, word = str(match.lastgroup), match[0]
            if match["directive"]:
                kind = "literal"
                place = self._behind_directive(word, place)
                if word in _STATEMENTS:
                    continue
            elif match["repeat"] or match["range"]:
                kind = "sign"
                fewest = match["fewest"] or match["least"] or "0"
                word = "?" if int(fewest) == 0 else "+"
            if kind != "blank":
                yield kind, word

    def _behind_directive(self, name: str, place: int) -> int:
        if name in _TO_THE_LINES_END:
            end = self._text.find("\n", place)
            return len(self._text) if end < 0 else end
        if name not in _WITH_JSON:
            raise LarkError(f"{name} is not supported")
        start = self._text.find("{", place)
        try:
            value, end = json.JSONDecoder().raw_decode(self._text, start)
        except (ValueError, RecursionError) as error:
            raise LarkError(f"{name} is not followed by JSON") from error
        self.schemas.append(value)
        return end

    def _begin(self, name: str) -> None:
        self._open = [_Body(name, is_rule=True)]
        self._bodies += self._open
        self._last = None

    def _take(self, kind: str, word: str) -> None:
        body = self._open[-1]
        if kind == "rule":
            self._last = word
            body.add(word)
        elif kind in ("literal", "terminal"):
            self._last = None
        elif word in ("(", "["):
            group = _Body(f"({len(self._bodies)}", is_optional=word == "[")
            self._bodies.append(group)
            self._open.append(group)
            self._last = None
        elif word in (")", "]"):
            self._close()
        elif word == "|":
            body.alternatives.append([])
            self._last = None
        elif word in ("*", "?") and self._last is not None:
            body.alternatives[-1].pop()
            self._last = None

    def _close(self) -> None:
        if len(self._open) < 2:
            raise LarkError("a parenthesis is closed that was not opened")
        group = self._open.pop()
        if group.is_optional:
            group.alternatives.append([])
        self._open[-1].add(group.name)
        self._last = group.name
