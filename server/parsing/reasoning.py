"""Tells a model's thinking, between tags at the start of its answer, from the answer proper."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from server.parsing.deltas import Delta, ReasoningDelta
from server.parsing.tags import partial_tag_length, split_at_tag

OPEN_TAG, CLOSE_TAG = "<think>", "</think>"


class _State(Enum):
    START = auto()
    THINKING = auto()
    BEHIND = auto()
    """Past the closing tag, where white space is no part of the answer."""
    ANSWER = auto()


class ReasoningSplitter:
    """Splits an answer as it arrives; white space around the thinking belongs to neither part."""

    def __init__(self, *, starts_inside: bool) -> None:
        """
        Args:
            starts_inside: whether the prompt itself has opened the thinking.
        """
        self._state = _State.THINKING if starts_inside else _State.START
        self._held = ""
        self._said_anything = False
        self.has_reasoning = starts_inside
        """Whether the answer began with thinking."""

    def feed(self, text: str) -> tuple[list[Delta], str]:
        """Thinking, and text of the answer proper."""
        self._held += text
        deltas: list[Delta] = []
        if self._state is _State.START:
            self._leave_start()
        if self._state is _State.THINKING:
            deltas += self._think()
        if self._state is _State.BEHIND:
            self._held = self._held.lstrip()
            if self._held:
                self._state = _State.ANSWER
        if self._state is not _State.ANSWER:
            return deltas, ""
        answer, self._held = self._held, ""
        return deltas, answer

    def finish(self) -> tuple[list[Delta], str]:
        """What was held back, once the answer has ended."""
        held, self._held = self._held, ""
        if self._state is _State.THINKING:
            rest = held.rstrip()
            return ([ReasoningDelta(rest)] if rest else []), ""
        return [], held if self._state is _State.START else ""

    def _leave_start(self) -> None:
        begun = self._held.lstrip()
        if begun.startswith(OPEN_TAG):
            self._state = _State.THINKING
            self.has_reasoning = True
            self._held = begun.removeprefix(OPEN_TAG)
        elif not OPEN_TAG.startswith(begun):
            self._state = _State.ANSWER

    def _think(self) -> list[Delta]:
        if not self._said_anything:
            self._held = self._held.lstrip()
        thought, behind = split_at_tag(self._held, CLOSE_TAG)
        if behind is None:
            keep = partial_tag_length(thought, CLOSE_TAG)
            settled = thought[: len(thought) - keep].rstrip()
            self._held = thought[len(settled) :]
            thought = settled
        else:
            self._state, self._held, thought = _State.BEHIND, behind, thought.rstrip()
        self._said_anything = self._said_anything or bool(thought)
        return [ReasoningDelta(thought)] if thought else []


class ReasoningTokens:
    """Counts the tokens up to the closing tag."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        """
        Args:
            token_bytes: bytes by token id.
        """
        self._token_bytes = token_bytes
        self._tail = b""
        self._closed = False
        self.count = 0

    def add(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if self._closed:
                return
            self.count += 1
            raw = self._token_bytes[token_id] if token_id < len(self._token_bytes) else b""
            self._tail = self._tail[-len(CLOSE_TAG) :] + raw
            self._closed = CLOSE_TAG.encode() in self._tail
