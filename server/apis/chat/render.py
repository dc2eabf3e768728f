"""Engine outputs as /v1/chat/completions responses."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.request import RequestOutput, TokenLogprob, Usage
from server.apis.chat.schema import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatFinishReason,
    ChatLogprobs,
    ChatTokenLogprob,
    TopLogprob,
)
from server.apis.shared.render.head import ResponseHead
from server.apis.shared.render.tokens import api_finish_reason, json_logprob, token_text
from server.apis.shared.render.usage import UsageReport
from server.apis.shared.schema.error import ErrorBody
from server.apis.shared.schema.tools import (
    FunctionCall,
    FunctionCallDelta,
    ToolCallAnswer,
    ToolCallDelta,
)
from server.errors import ApiError
from server.parsing.answer import AnswerFormat
from server.parsing.deltas import (
    Delta,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)


@dataclass(frozen=True, slots=True)
class ChatUpdate:
    index: int
    deltas: tuple[Delta, ...]
    logprobs: tuple[TokenLogprob, ...]
    token_ids: tuple[int, ...]
    opens: bool
    """Whether it is its choice's first."""
    finish_reason: ChatFinishReason | None
    stop_reason: str | int | None


class ChatRenderer:
    """Renders updates of chat completions; implements `Renderer[ChatUpdate]`."""

    ends_with_done = True

    def __init__(
        self,
        head: ResponseHead,
        *,
        num_choices: int,
        answer_format: AnswerFormat,
        prompt_token_ids: tuple[int, ...] | None,
        with_logprobs: bool,
        usage: UsageReport,
        calls_functions: bool = False,
    ) -> None:
        """
        Args:
            prompt_token_ids: None: no token ids are told.
            calls_functions: a call is told in the old form, as `function_call`.
        """
        self._head = head
        self._parsers = [answer_format.parser() for _ in range(num_choices)]
        self._finds_calls = answer_format.calls is not None
        self._prompt_token_ids = prompt_token_ids
        self._with_logprobs = with_logprobs
        self._usage = usage
        self._calls_functions = calls_functions
        self._opened: set[int] = set()

    def take(self, index: int, output: RequestOutput) -> ChatUpdate:
        parser = self._parsers[index]
        deltas = tuple(parser.take(output))
        finish_reason: ChatFinishReason | None = api_finish_reason(output)
        if finish_reason == "stop" and parser.num_calls:
            finish_reason = "function_call" if self._calls_functions else "tool_calls"
        opens = index not in self._opened
        self._opened.add(index)
        return ChatUpdate(
            index=index,
            deltas=deltas,
            logprobs=output.logprobs,
            token_ids=output.token_ids,
            opens=opens,
            finish_reason=finish_reason,
            stop_reason=output.stop_reason,
        )

    def opening(self, usage: Usage) -> Iterable[ChatChunk]:
        return ()

    def chunks(self, update: ChatUpdate, usage: Usage) -> Iterable[ChatChunk]:
        if update.opens:
            # With tools it is open yet whether there is any text.
            content = None if self._finds_calls else ""
            opening = ChatDelta(role="assistant", content=content, refusal=None)
            yield self._chunk(update.index, opening, usage, prompt_ids=self._told_prompt_ids())
        about_tokens: dict[str, Any] = {}
        if update.logprobs or self._prompt_token_ids is not None:
            about_tokens = {"logprobs": self._logprobs(update.logprobs), **self._tokens(update)}
        # What is told about a update's tokens goes along with its first delta.
        for delta in update.deltas or ([TextDelta("")] if about_tokens else []):
            yield self._chunk(update.index, self._delta(delta), usage, **about_tokens)
            about_tokens = {}
        if update.finish_reason is not None:
            yield self._chunk(
                update.index,
                ChatDelta(),
                usage,
                finish_reason=update.finish_reason,
                stop_reason=update.stop_reason,
            )

    def closing(self, usage: Usage) -> Iterable[ChatChunk]:
        if self._usage.at_end:
            yield ChatChunk(
                object="chat.completion.chunk",
                choices=[],
                usage=self._usage.body(usage, self._reasoning_tokens),
                **self._head,
            )

    def failure(self, error: ApiError) -> Iterable[ErrorBody]:
        yield error.body

    def response(self, updates: Sequence[ChatUpdate], usage: Usage) -> ChatCompletion:
        by_choice: list[list[ChatUpdate]] = [[] for _ in self._parsers]
        for update in updates:
            by_choice[update.index].append(update)
        return ChatCompletion(
            object="chat.completion",
            choices=[self._choice(parts) for parts in by_choice],
            usage=self._usage.body(usage, self._reasoning_tokens),
            **self._told_prompt_ids(),
            **self._head,
        )

    @property
    def _reasoning_tokens(self) -> int:
        return sum(parser.reasoning_tokens for parser in self._parsers)

    def _told_prompt_ids(self) -> dict[str, Any]:
        if self._prompt_token_ids is None:
            return {}
        return {"prompt_token_ids": list(self._prompt_token_ids)}

    def _tokens(self, *updates: ChatUpdate) -> dict[str, Any]:
        if self._prompt_token_ids is None:
            return {}
        return {"token_ids": [token_id for update in updates for token_id in update.token_ids]}

    def _choice(self, updates: Sequence[ChatUpdate]) -> ChatChoice:
        last = updates[-1]
        if last.finish_reason is None:
            raise ValueError(f"choice {last.index} has not finished")
        return ChatChoice(
            index=last.index,
            message=self._message([delta for update in updates for delta in update.deltas]),
            logprobs=self._logprobs([entry for update in updates for entry in update.logprobs]),
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            **self._tokens(*updates),
        )

    def _chunk(
        self,
        index: int,
        delta: ChatDelta,
        usage: Usage,
        *,
        prompt_ids: dict[str, Any] | None = None,
        **fields: Any,
    ) -> ChatChunk:
        optional = {"logprobs": None, "finish_reason": None, **fields}
        choice = ChatChunkChoice(index=index, delta=delta, **optional)
        return ChatChunk(
            object="chat.completion.chunk",
            choices=[choice],
            **self._head,
            **(prompt_ids or {}),
            **self._usage.chunk_fields(usage, self._reasoning_tokens),
        )

    def _delta(self, delta: Delta) -> ChatDelta:
        match delta:
            case TextDelta(text):
                return ChatDelta(content=text)
            case ReasoningDelta(text):
                return ChatDelta(reasoning_content=text)
            case ToolCallStart() | ToolCallArguments() if self._calls_functions:
                return ChatDelta(function_call=_function_delta(delta))
            case ToolCallStart() | ToolCallArguments():
                return ChatDelta(tool_calls=[_tool_call_delta(delta)])

    def _message(self, deltas: Sequence[Delta]) -> AssistantMessage:
        content = "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))
        reasoning = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
        functions = _called_functions(deltas)
        optional: dict[str, Any] = {"reasoning_content": reasoning} if reasoning else {}
        if functions and self._calls_functions:
            optional["function_call"] = functions[0]
        elif functions:
            optional["tool_calls"] = [
                ToolCallAnswer(id=new_call_id(), type="function", function=function)
                for function in functions
            ]
        return AssistantMessage(
            role="assistant",
            content=content or (None if functions else ""),
            refusal=None,
            **optional,
        )

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> ChatLogprobs | None:
        if not self._with_logprobs:
            return None
        return ChatLogprobs(content=[_token_logprob(entry) for entry in entries], refusal=None)


def _tool_call_delta(delta: ToolCallStart | ToolCallArguments) -> ToolCallDelta:
    function = _function_delta(delta)
    if isinstance(delta, ToolCallArguments):
        return ToolCallDelta(index=delta.index, function=function)
    return ToolCallDelta(index=delta.index, id=new_call_id(), type="function", function=function)


def _function_delta(delta: ToolCallStart | ToolCallArguments) -> FunctionCallDelta:
    if isinstance(delta, ToolCallArguments):
        return FunctionCallDelta(arguments=delta.text)
    return FunctionCallDelta(name=delta.name, arguments="")


def _called_functions(deltas: Sequence[Delta]) -> list[FunctionCall]:
    names = {delta.index: delta.name for delta in deltas if isinstance(delta, ToolCallStart)}
    arguments = dict.fromkeys(names, "")
    for delta in deltas:
        if isinstance(delta, ToolCallArguments):
            arguments[delta.index] += delta.text
    return [FunctionCall(name=name, arguments=arguments[index]) for index, name in names.items()]


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def _token_logprob(entry: TokenLogprob) -> ChatTokenLogprob:
    return ChatTokenLogprob(
        token=token_text(entry.token_bytes),
        bytes=list(entry.token_bytes),
        logprob=json_logprob(entry.logprob),
        top_logprobs=[
            TopLogprob(
                token=token_text(token_bytes),
                bytes=list(token_bytes),
                logprob=json_logprob(logprob),
            )
            for _, token_bytes, logprob in entry.top
        ],
    )
