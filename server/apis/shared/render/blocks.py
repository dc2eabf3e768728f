"""An answer as a row of blocks: stretches of reasoning, text and tool calls, one after another."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from server.parsing.deltas import (
    Delta,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)


class BlockKind(Enum):
    REASONING = auto()
    TEXT = auto()
    CALL = auto()


@dataclass(slots=True)
class Block:
    index: int
    kind: BlockKind
    name: str = ""
    """The tool of a call."""
    text: str = ""
    """So far; of a call its arguments."""
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    """What its ids are made from."""


@dataclass(frozen=True, slots=True)
class BlockOpened:
    block: Block


@dataclass(frozen=True, slots=True)
class BlockGrown:
    block: Block
    text: str


@dataclass(frozen=True, slots=True)
class BlockClosed:
    block: Block


BlockEvent = BlockOpened | BlockGrown | BlockClosed


class BlockTracker:
    """Follows deltas; at most one block, the last, is open."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._is_open = False

    def take(self, deltas: Iterable[Delta]) -> list[BlockEvent]:
        events: list[BlockEvent] = []
        for delta in deltas:
            match delta:
                case TextDelta(text):
                    events += self._continue(BlockKind.TEXT, text)
                case ReasoningDelta(text):
                    events += self._continue(BlockKind.REASONING, text)
                case ToolCallStart(_, name):
                    events += self.close()
                    events.append(self._open(BlockKind.CALL, name))
                case ToolCallArguments(_, text):
                    events.append(self._grow(text))
        return events

    def close(self) -> list[BlockEvent]:
        """Close the open block, if there is one."""
        if not self._is_open:
            return []
        self._is_open = False
        return [BlockClosed(self.blocks[-1])]

    def _continue(self, kind: BlockKind, text: str) -> list[BlockEvent]:
        if self._is_open and self.blocks[-1].kind is kind:
            return [self._grow(text)]
        return [*self.close(), self._open(kind), self._grow(text)]

    def _open(self, kind: BlockKind, name: str = "") -> BlockOpened:
        self.blocks.append(Block(len(self.blocks), kind, name))
        self._is_open = True
        return BlockOpened(self.blocks[-1])

    def _grow(self, text: str) -> BlockGrown:
        self.blocks[-1].text += text
        return BlockGrown(self.blocks[-1], text)
