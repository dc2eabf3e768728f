"""Requests and responses of /v1/responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, FailFast, Field, Tag
from typing_extensions import TypeAliasType

from server.apis.responses.items import ResponseInput
from server.apis.shared.schema.base import (
    NamedEvent,
    ReasoningEffort,
    RequestModel,
    ResponseModel,
    Verbosity,
)
from server.apis.shared.schema.sampling import SamplingFields
from server.apis.shared.schema.structured import JsonObjectFormat, NamedSchema, TextFormat
from server.apis.shared.schema.tools import FunctionName, UnservedTool, by_mode_or_name


class FunctionTool(RequestModel):
    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


def _tool_kind(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str):
        return None
    return "<function>" if kind == "function" else "<unserved>"


ResponseTool = Annotated[
    Annotated[FunctionTool, Tag("<function>")] | Annotated[UnservedTool, Tag("<unserved>")],
    Discriminator(
        _tool_kind,
        custom_error_type="tool_type",
        custom_error_message="Input should be a tool with a type",
    ),
]
ResponseTools = TypeAliasType("ResponseTools", Annotated[list[ResponseTool], FailFast()])


class NamedTool(RequestModel):
    type: Literal["function"]
    name: FunctionName


class AllowedResponseTools(RequestModel):
    """Narrows the tools of the request down."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedTool]


ResponseToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<mode>")]
    | Annotated[NamedTool, Tag("<named>")]
    | Annotated[AllowedResponseTools, Tag("<allowed>")],
    by_mode_or_name,
]


class ReasoningOptions(RequestModel):
    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class FlatSchemaFormat(NamedSchema):
    """A JSON schema format without the chat API's object around the schema."""

    type: Literal["json_schema"]


_FORMATS = ("text", "json_object", "json_schema")


def _format_kind(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"<{kind}>" if kind in _FORMATS else None


OutputFormat = Annotated[
    Annotated[TextFormat, Tag("<text>")]
    | Annotated[JsonObjectFormat, Tag("<json_object>")]
    | Annotated[FlatSchemaFormat, Tag("<json_schema>")],
    Discriminator(
        _format_kind,
        custom_error_type="output_format_type",
        custom_error_message=f"Input should be an object of type {', '.join(_FORMATS)}",
    ),
]


class TextOptions(RequestModel):
    format: OutputFormat | None = None
    verbosity: Verbosity | None = None


class ResponsesRequest(SamplingFields):
    input: ResponseInput
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    tools: ResponseTools | None = None
    tool_choice: ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    include: list[str] | None = Field(
        None, description="accepted where it concerns what no answer here has, or has in any case"
    )
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto: the oldest turns are left out of a conversation that is too long"
    )
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


class ResponseFailure(ResponseModel):
    code: str
    message: str


class ResponseBody(ResponseModel):
    """The response object; `settings` of the request are repeated in it."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None
    error: ResponseFailure | None
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
    truncation: Literal["auto", "disabled"]
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
