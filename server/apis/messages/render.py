"""Engine outputs as /v1/messages responses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from engine.request import FinishReason, RequestOutput, Usage
from server.apis.messages.schema import (
    AnswerBlock,
    BlockDelta,
    BlockStart,
    BlockStop,
    InputJsonDelta,
    MessageBody,
    MessageDelta,
    MessageStart,
    MessageStop,
    MessagesUsage,
    StopDelta,
    StopReason,
    TextAnswer,
    TextDelta,
    ThinkingAnswer,
    ThinkingDelta,
    ToolUseAnswer,
)
from server.apis.shared.render.blocks import (
    Block,
    BlockClosed,
    BlockEvent,
    BlockGrown,
    BlockKind,
    BlockOpened,
    BlockTracker,
)
from server.apis.shared.render.head import ResponseHead
from server.apis.shared.schema.base import NamedEvent
from server.errors import ApiError, anthropic_error
from server.parsing.answer import AnswerParser
from server.parsing.call_arguments import call_arguments


@dataclass(frozen=True, slots=True)
class MessagesUpdate:
    events: tuple[BlockEvent, ...]


class MessagesRenderer:
    """Renders one message; implements `Renderer[MessagesUpdate]`."""

    ends_with_done = False

    def __init__(self, head: ResponseHead, parser: AnswerParser) -> None:
        self._head = head
        self._parser = parser
        self._tracker = BlockTracker()
        self._stop_reason: StopReason | None = None
        self._stop_sequence: str | None = None

    def take(self, index: int, output: RequestOutput) -> MessagesUpdate:
        events = self._tracker.take(self._parser.take(output))
        if output.finish_reason is not None:
            events += self._tracker.close()
            self._note_end(output)
        return MessagesUpdate(tuple(events))

    def opening(self, usage: Usage) -> Iterator[NamedEvent]:
        yield MessageStart(type="message_start", message=self._body([], usage))

    def chunks(self, update: MessagesUpdate, usage: Usage) -> Iterator[NamedEvent]:
        for event in update.events:
            index = event.block.index
            match event:
                case BlockOpened(block):
                    start = _answer_block(block, "")
                    yield BlockStart(type="content_block_start", index=index, content_block=start)
                case BlockGrown(block, text):
                    yield BlockDelta(
                        type="content_block_delta", index=index, delta=_delta(block, text)
                    )
                case BlockClosed():
                    yield BlockStop(type="content_block_stop", index=index)

    def closing(self, usage: Usage) -> Iterator[NamedEvent]:
        if self._stop_reason is None:
            raise ValueError("the message has not finished")
        delta = StopDelta(stop_reason=self._stop_reason, stop_sequence=self._stop_sequence)
        yield MessageDelta(type="message_delta", delta=delta, usage=_usage(usage))
        yield MessageStop(type="message_stop")

    def response(self, updates: Sequence[MessagesUpdate], usage: Usage) -> MessageBody:
        blocks = [_answer_block(block, block.text) for block in self._tracker.blocks]
        return self._body(blocks, usage)

    def failure(self, error: ApiError) -> Iterable[NamedEvent]:
        yield anthropic_error(error)

    def _note_end(self, output: RequestOutput) -> None:
        if output.finish_reason is FinishReason.LENGTH:
            self._stop_reason = "max_tokens"
        elif self._parser.num_calls:
            self._stop_reason = "tool_use"
        elif isinstance(output.stop_reason, str):
            self._stop_reason, self._stop_sequence = "stop_sequence", output.stop_reason
        else:
            self._stop_reason = "end_turn"

    def _body(self, blocks: list[AnswerBlock], usage: Usage) -> MessageBody:
        return MessageBody(
            id=self._head["id"],
            type="message",
            role="assistant",
            model=self._head["model"],
            content=blocks,
            stop_reason=self._stop_reason,
            stop_sequence=self._stop_sequence,
            usage=_usage(usage),
        )


def _usage(usage: Usage) -> MessagesUsage:
    """Anthropic counts the cached part of a prompt apart from the rest."""
    return MessagesUsage(
        input_tokens=usage.prompt_tokens - usage.cached_tokens,
        cache_creation_input_tokens=0,
        cache_read_input_tokens=usage.cached_tokens,
        output_tokens=usage.completion_tokens,
    )


def _answer_block(block: Block, text: str) -> AnswerBlock:
    match block.kind:
        case BlockKind.TEXT:
            return TextAnswer(type="text", text=text)
        case BlockKind.REASONING:
            return ThinkingAnswer(type="thinking", thinking=text, signature="")
        case BlockKind.CALL:
            return ToolUseAnswer(
                type="tool_use",
                id=f"toolu_{block.key[:24]}",
                name=block.name,
                # The token limit may have cut the arguments off.
                input=call_arguments(text) or {},
            )


def _delta(block: Block, text: str) -> TextDelta | ThinkingDelta | InputJsonDelta:
    match block.kind:
        case BlockKind.TEXT:
            return TextDelta(type="text_delta", text=text)
        case BlockKind.REASONING:
            return ThinkingDelta(type="thinking_delta", thinking=text)
        case BlockKind.CALL:
            return InputJsonDelta(type="input_json_delta", partial_json=text)
