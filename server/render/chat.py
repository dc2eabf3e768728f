"""Engine outputs as /v1/chat/completions responses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from engine.request import RequestOutput, TokenLogprob, Usage
from server.render.renderer import ResponseHead
from server.render.tokens import api_finish_reason, json_logprob, token_text
from server.render.usage import UsageReport
from server.schemas.chat import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatTokenLogprob,
    TopLogprob,
)


@dataclass(frozen=True, slots=True)
class ChatPiece:
    index: int
    text: str
    logprobs: tuple[TokenLogprob, ...]
    opens: bool
    """Whether it is its choice's first."""
    finish_reason: Literal["stop", "length"] | None
    stop_reason: str | int | None


class ChatRenderer:
    """Renders pieces of chat completions; implements `Renderer[ChatPiece]`."""

    ends_with_done = True

    def __init__(
        self,
        head: ResponseHead,
        *,
        num_choices: int,
        with_logprobs: bool,
        usage: UsageReport,
    ) -> None:
        self._head = head
        self._num_choices = num_choices
        self._with_logprobs = with_logprobs
        self._usage = usage
        self._opened: set[int] = set()

    def take(self, index: int, output: RequestOutput) -> ChatPiece:
        opens = index not in self._opened
        self._opened.add(index)
        return ChatPiece(
            index=index,
            text=output.text,
            logprobs=output.logprobs,
            opens=opens,
            finish_reason=api_finish_reason(output),
            stop_reason=output.stop_reason,
        )

    def opening(self, usage: Usage) -> Iterable[ChatChunk]:
        return ()

    def chunks(self, piece: ChatPiece, usage: Usage) -> Iterable[ChatChunk]:
        if piece.opens:
            opening = ChatDelta(role="assistant", content="", refusal=None)
            yield self._chunk(piece.index, opening, usage)
        if piece.text or piece.logprobs:
            delta = ChatDelta(content=piece.text)
            yield self._chunk(piece.index, delta, usage, self._logprobs(piece.logprobs))
        if piece.finish_reason is not None:
            yield self._chunk(
                piece.index,
                ChatDelta(),
                usage,
                finish_reason=piece.finish_reason,
                stop_reason=piece.stop_reason,
            )

    def closing(self, usage: Usage) -> Iterable[ChatChunk]:
        if self._usage.at_end:
            yield ChatChunk(
                object="chat.completion.chunk",
                choices=[],
                usage=self._usage.body(usage),
                **self._head,
            )

    def response(self, pieces: Sequence[ChatPiece], usage: Usage) -> ChatCompletion:
        by_choice: list[list[ChatPiece]] = [[] for _ in range(self._num_choices)]
        for piece in pieces:
            by_choice[piece.index].append(piece)
        return ChatCompletion(
            object="chat.completion",
            choices=[self._choice(parts) for parts in by_choice],
            usage=self._usage.body(usage),
            **self._head,
        )

    def _choice(self, pieces: Sequence[ChatPiece]) -> ChatChoice:
        last = pieces[-1]
        if last.finish_reason is None:
            raise ValueError(f"choice {last.index} has not finished")
        text = "".join(piece.text for piece in pieces)
        return ChatChoice(
            index=last.index,
            message=AssistantMessage(role="assistant", content=text, refusal=None),
            logprobs=self._logprobs([entry for piece in pieces for entry in piece.logprobs]),
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
        )

    def _chunk(
        self,
        index: int,
        delta: ChatDelta,
        usage: Usage,
        logprobs: ChatLogprobs | None = None,
        **end: Any,
    ) -> ChatChunk:
        choice = ChatChunkChoice(
            index=index, delta=delta, logprobs=logprobs, **{"finish_reason": None, **end}
        )
        return ChatChunk(
            object="chat.completion.chunk",
            choices=[choice],
            **self._head,
            **self._usage.chunk_fields(usage),
        )

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> ChatLogprobs | None:
        if not self._with_logprobs:
            return None
        return ChatLogprobs(content=[_token_logprob(entry) for entry in entries], refusal=None)


def _token_logprob(entry: TokenLogprob) -> ChatTokenLogprob:
    return ChatTokenLogprob(
        token=token_text(entry.piece),
        bytes=list(entry.piece),
        logprob=json_logprob(entry.logprob),
        top_logprobs=[
            TopLogprob(token=token_text(piece), bytes=list(piece), logprob=json_logprob(logprob))
            for _, piece, logprob in entry.top
        ],
    )
