"""Engine outputs as /v1/responses responses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from engine.request import FinishReason, RequestOutput, SamplingParams, Usage
from server.apis.responses.schema import (
    ArgumentsDeltaEvent,
    ArgumentsDoneEvent,
    CallItem,
    ErrorEvent,
    FunctionTool,
    IncompleteDetails,
    InputTokensDetails,
    ItemEvent,
    ItemStatus,
    MessageItem,
    OutputItem,
    OutputText,
    OutputTokensDetails,
    PartEvent,
    ReasoningItem,
    ReasoningPart,
    ResponseBody,
    ResponseFailure,
    ResponsesRequest,
    ResponseUsage,
    StateEvent,
    StreamEvent,
    TextDeltaEvent,
    TextDoneEvent,
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
from server.errors import ApiError
from server.parsing.answer import AnswerParser

_TEXT_EVENTS = {
    BlockKind.TEXT: "response.output_text",
    BlockKind.REASONING: "response.reasoning_text",
}


@dataclass(frozen=True, slots=True)
class ResponseUpdate:
    events: tuple[BlockEvent, ...]
    ends_early: bool
    """Whether it is the last and the answer was cut off by the token limit."""


class ResponsesRenderer:
    """Renders one response; implements `Renderer[ResponseUpdate]`."""

    ends_with_done = False

    def __init__(
        self,
        settings: dict[str, Any],
        parser: AnswerParser,
        on_done: Callable[[ResponseBody, Sequence[Block]], None] | None,
    ) -> None:
        """
        Args:
            settings: fields of the response that are known from the request.
            on_done: is given the final response and its blocks; None: nobody is.
        """
        self._settings = settings
        self._parser = parser
        self._on_done = on_done
        self._tracker = BlockTracker()
        self._num_events = 0
        self._ends_early = False

    def take(self, index: int, output: RequestOutput) -> ResponseUpdate:
        events = self._tracker.take(self._parser.take(output))
        if output.finish_reason is not None:
            events += self._tracker.close()
            self._ends_early = output.finish_reason is FinishReason.LENGTH
        return ResponseUpdate(tuple(events), self._ends_early)

    def opening(self, usage: Usage) -> Iterator[StreamEvent]:
        for name in ("response.created", "response.in_progress"):
            body = self._body("in_progress", [], None)
            yield StateEvent(**self._named(name), response=body)

    def chunks(self, update: ResponseUpdate, usage: Usage) -> Iterator[StreamEvent]:
        for event in update.events:
            match event:
                case BlockOpened(block):
                    yield from self._opened(block)
                case BlockGrown(block, text):
                    yield self._grown(block, text)
                case BlockClosed(block):
                    yield from self._closed(block, self._final_status(block))

    def closing(self, usage: Usage) -> Iterator[StreamEvent]:
        body = self._final(usage)
        yield StateEvent(**self._named(f"response.{body.status}"), response=body)

    def response(self, updates: Sequence[ResponseUpdate], usage: Usage) -> ResponseBody:
        return self._final(usage)

    def failure(self, error: ApiError) -> Iterable[StreamEvent]:
        """Clients wait for one or the other."""
        self._ends_early = True
        failure = ResponseFailure(code=error.code or "server_error", message=error.message)
        failed = self._body("failed", self._items(), None).model_copy(update={"error": failure})
        yield StateEvent(**self._named("response.failed"), response=failed)
        yield ErrorEvent(
            **self._named("error"), code=error.code, message=error.message, param=error.param
        )

    def _final(self, usage: Usage) -> ResponseBody:
        status = "incomplete" if self._ends_early else "completed"
        body = self._body(status, self._items(), usage)
        if self._on_done is not None:
            self._on_done(body, self._tracker.blocks)
        return body

    def _items(self) -> list[OutputItem]:
        return [_item(block, self._final_status(block)) for block in self._tracker.blocks]

    def _final_status(self, block: Block) -> ItemStatus:
        is_last = block is self._tracker.blocks[-1]
        return "incomplete" if self._ends_early and is_last else "completed"

    def _body(self, status: Any, items: Sequence[OutputItem], usage: Usage | None) -> ResponseBody:
        early = IncompleteDetails(reason="max_output_tokens") if status == "incomplete" else None
        return ResponseBody(
            object="response",
            status=status,
            output=list(items),
            usage=None if usage is None else self._usage(usage),
            incomplete_details=early,
            **self._settings,
        )

    def _usage(self, usage: Usage) -> ResponseUsage:
        return ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=usage.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(
                reasoning_tokens=self._parser.reasoning_tokens
            ),
            total_tokens=usage.prompt_tokens + usage.completion_tokens,
        )

    def _opened(self, block: Block) -> Iterator[StreamEvent]:
        item = _item(block, "in_progress", with_content=False)
        yield ItemEvent(
            **self._named("response.output_item.added"), output_index=block.index, item=item
        )
        if block.kind is not BlockKind.CALL:
            yield PartEvent(
                **self._named("response.content_part.added"), **_place(block), part=_part(block, "")
            )

    def _grown(self, block: Block, text: str) -> StreamEvent:
        if block.kind is BlockKind.CALL:
            return ArgumentsDeltaEvent(
                **self._named("response.function_call_arguments.delta"),
                item_id=_item_id(block),
                output_index=block.index,
                delta=text,
            )
        name = f"{_TEXT_EVENTS[block.kind]}.delta"
        return TextDeltaEvent(**self._named(name), **_place(block), delta=text, logprobs=[])

    def _closed(self, block: Block, status: ItemStatus) -> Iterator[StreamEvent]:
        if block.kind is BlockKind.CALL:
            yield ArgumentsDoneEvent(
                **self._named("response.function_call_arguments.done"),
                item_id=_item_id(block),
                output_index=block.index,
                name=block.name,
                arguments=block.text,
            )
        else:
            name = f"{_TEXT_EVENTS[block.kind]}.done"
            yield TextDoneEvent(**self._named(name), **_place(block), text=block.text, logprobs=[])
            yield PartEvent(
                **self._named("response.content_part.done"),
                **_place(block),
                part=_part(block, block.text),
            )
        yield ItemEvent(
            **self._named("response.output_item.done"),
            output_index=block.index,
            item=_item(block, status),
        )

    def _named(self, name: str) -> dict[str, Any]:
        number = self._num_events
        self._num_events += 1
        return {"type": name, "sequence_number": number}


def response_settings(
    body: ResponsesRequest,
    tools: Sequence[FunctionTool],
    params: SamplingParams,
    head: ResponseHead,
) -> dict[str, Any]:
    """The fields of a response that are known from its request.

    Args:
        params: those the engine was given.
    """
    choice = body.tool_choice or "auto"
    text = {"format": {"type": "text"}}
    if body.text is not None:
        text |= body.text.model_dump(by_alias=True, exclude_none=True)
    return {
        "id": head["id"],
        "created_at": head["created"],
        "model": head["model"],
        "error": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "store": body.store is not False,
        "temperature": params.temperature,
        "text": text,
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [tool.model_dump() for tool in tools],
        "top_p": params.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }


def call_id(block: Block) -> str:
    """What ties a tool's output to a call."""
    return f"call_{block.key[:24]}"


def _item_id(block: Block) -> str:
    prefix = {BlockKind.TEXT: "msg", BlockKind.REASONING: "rs", BlockKind.CALL: "fc"}[block.kind]
    return f"{prefix}_{block.key}"


def _place(block: Block) -> dict[str, Any]:
    return {"item_id": _item_id(block), "output_index": block.index, "content_index": 0}


def _part(block: Block, text: str) -> OutputText | ReasoningPart:
    if block.kind is BlockKind.REASONING:
        return ReasoningPart(type="reasoning_text", text=text)
    return OutputText(type="output_text", text=text, annotations=[], logprobs=[])


def _item(block: Block, status: ItemStatus, *, with_content: bool = True) -> OutputItem:
    part = _part(block, block.text)
    if block.kind is BlockKind.CALL:
        return CallItem(
            id=_item_id(block),
            type="function_call",
            status=status,
            call_id=call_id(block),
            name=block.name,
            arguments=block.text if with_content else "",
        )
    if isinstance(part, ReasoningPart):
        return ReasoningItem(
            id=_item_id(block),
            type="reasoning",
            status=status,
            summary=[],
            content=[part] if with_content else [],
        )
    return MessageItem(
        id=_item_id(block),
        type="message",
        status=status,
        role="assistant",
        content=[part] if with_content else [],
    )
