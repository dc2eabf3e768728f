"""What a model's answer consists of, as it arrives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class TextDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """Opens tool call `index` of the answer (0, 1, ...)."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


Delta = TextDelta | ReasoningDelta | ToolCallStart | ToolCallArguments


class ToolParser(Protocol):
    """Finds the tool calls in an answer."""

    def feed(self, text: str) -> list[Delta]:
        """What more text of the answer means; text that may still become markup is held back."""

    def finish(self) -> list[Delta]:
        """What was held back, once the answer has ended."""


def text_deltas(text: str) -> list[Delta]:
    return [TextDelta(text)] if text else []
