"""Requests and responses of /v1/responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, FailFast, Field, Tag
from typing_extensions import TypeAliasType

from server.schemas.common import NamedEvent, RequestModel, ResponseModel
from server.schemas.sampling import SamplingFields
from server.schemas.tools import FunctionName


class InputText(RequestModel):
    type: Literal["input_text", "output_text", "text"]
    text: str


InputTexts = TypeAliasType("InputTexts", Annotated[list[InputText], FailFast()])


def _content_kind(value: Any) -> str | None:
    return "<text>" if isinstance(value, str) else "<parts>" if isinstance(value, list) else None


ItemContent = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[InputTexts, Tag("<parts>")],
    Discriminator(
        _content_kind,
        custom_error_type="content_type",
        custom_error_message="Input should be a string or a list of text parts",
    ),
]


class InputMessage(RequestModel):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: ItemContent


class InputCall(RequestModel):
    type: Literal["function_call"]
    call_id: str
    name: FunctionName
    arguments: str


class InputCallOutput(RequestModel):
    type: Literal["function_call_output"]
    call_id: str
    output: ItemContent


class ReasoningText(RequestModel):
    type: Literal["reasoning_text"]
    text: str


ReasoningTexts = TypeAliasType("ReasoningTexts", Annotated[list[ReasoningText], FailFast()])


class InputReasoning(RequestModel):
    type: Literal["reasoning"]
    content: ReasoningTexts | None = None


_ITEM_KINDS = ("message", "function_call", "function_call_output", "reasoning")


def _item_kind(value: Any) -> str | None:
    kind = value.get("type", "message") if isinstance(value, dict) else None
    return f"<{kind}>" if kind in _ITEM_KINDS else None


InputItem = Annotated[
    Annotated[InputMessage, Tag("<message>")]
    | Annotated[InputCall, Tag("<function_call>")]
    | Annotated[InputCallOutput, Tag("<function_call_output>")]
    | Annotated[InputReasoning, Tag("<reasoning>")],
    Discriminator(
        _item_kind,
        custom_error_type="item_type",
        custom_error_message=f"Input should be an item of type {', '.join(_ITEM_KINDS)}",
    ),
]
InputItems = TypeAliasType(
    "InputItems", Annotated[list[InputItem], FailFast(), Field(min_length=1)]
)


def _input_kind(value: Any) -> str | None:
    return "<text>" if isinstance(value, str) else "<items>" if isinstance(value, list) else None


ResponseInput = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[InputItems, Tag("<items>")],
    Discriminator(
        _input_kind,
        custom_error_type="input_type",
        custom_error_message="Input should be a string or a list of items",
    ),
]


class FunctionTool(RequestModel):
    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


FunctionTools = TypeAliasType("FunctionTools", Annotated[list[FunctionTool], FailFast()])


class NamedTool(RequestModel):
    type: Literal["function"]
    name: FunctionName


def _choice_kind(value: Any) -> str | None:
    if isinstance(value, str):
        return "<mode>"
    return "<named>" if isinstance(value, dict) else None


ResponseToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<mode>")]
    | Annotated[NamedTool, Tag("<named>")],
    Discriminator(
        _choice_kind,
        custom_error_type="tool_choice_type",
        custom_error_message="Input should be 'none', 'auto', 'required' or name a function",
    ),
]


class ReasoningOptions(RequestModel):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesRequest(SamplingFields):
    input: ResponseInput
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    tools: FunctionTools | None = None
    tool_choice: ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    reasoning: ReasoningOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None


ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(ResponseModel):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class MessageItem(ResponseModel):
    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class CallItem(ResponseModel):
    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class ReasoningPart(ResponseModel):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(ResponseModel):
    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[Any]
    content: list[ReasoningPart]


OutputItem = MessageItem | CallItem | ReasoningItem


class InputTokensDetails(ResponseModel):
    cached_tokens: int


class OutputTokensDetails(ResponseModel):
    reasoning_tokens: int


class ResponseUsage(ResponseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(ResponseModel):
    reason: Literal["max_output_tokens"]


class ResponseBody(ResponseModel):
    """The response object; `settings` of the request are repeated in it."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete"]
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None
    error: None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, str | None]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"]
    user: str | None


class DeletedResponse(ResponseModel):
    id: str
    object: Literal["response"]
    deleted: bool


class StreamEvent(NamedEvent):
    sequence_number: int


class StateEvent(StreamEvent):
    response: ResponseBody


class ItemEvent(StreamEvent):
    output_index: int
    item: OutputItem


class PartEvent(StreamEvent):
    item_id: str
    output_index: int
    content_index: int
    part: OutputText | ReasoningPart


class TextDeltaEvent(StreamEvent):
    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: list[Any] = Field(default_factory=list)


class TextDoneEvent(StreamEvent):
    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: list[Any] = Field(default_factory=list)


class ArgumentsDeltaEvent(StreamEvent):
    item_id: str
    output_index: int
    delta: str


class ArgumentsDoneEvent(StreamEvent):
    item_id: str
    output_index: int
    name: str
    arguments: str


class ErrorEvent(StreamEvent):
    code: str | None
    message: str
    param: str | None
