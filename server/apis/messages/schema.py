"""Requests and responses of /v1/messages, in Anthropic's shape."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, FailFast, Field, Tag
from typing_extensions import TypeAliasType

from server.apis.shared.schema.base import NamedEvent, ReasoningEffort, RequestModel, ResponseModel
from server.apis.shared.schema.content import refuse_media
from server.apis.shared.schema.sampling import StopText
from server.apis.shared.schema.tools import FunctionName, UnservedTool
from server.apis.shared.schema.union import by_json_type


class TextBlock(RequestModel):
    type: Literal["text"]
    text: str


class ThinkingBlock(RequestModel):
    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(RequestModel):
    """What only the server that wrote it can read."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(RequestModel):
    type: Literal["tool_use"]
    id: str
    name: FunctionName
    input: dict[str, Any]


TextBlocks = TypeAliasType(
    "TextBlocks",
    Annotated[list[Annotated[TextBlock, BeforeValidator(refuse_media)]], FailFast()],
)


BlockText = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[TextBlocks, Tag("<blocks>")],
    by_json_type(
        {str: "<text>", list: "<blocks>"},
        error_type="text_type",
        message="Input should be a string or a list of text blocks",
    ),
]


class ToolResultBlock(RequestModel):
    type: Literal["tool_result"]
    tool_use_id: str
    content: BlockText | None = None
    is_error: bool | None = None


_BLOCK_KINDS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")


def _block_kind(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else None
    return f"<{kind}>" if kind in _BLOCK_KINDS else None


InputBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")],
    Discriminator(
        _block_kind,
        custom_error_type="block_type",
        custom_error_message=f"Input should be a block of type {', '.join(_BLOCK_KINDS)}",
    ),
]
InputBlocks = TypeAliasType(
    "InputBlocks",
    Annotated[
        list[Annotated[InputBlock, BeforeValidator(refuse_media)]], FailFast(), Field(min_length=1)
    ],
)

MessageContent = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[InputBlocks, Tag("<blocks>")],
    by_json_type(
        {str: "<text>", list: "<blocks>"},
        error_type="content_type",
        message="Input should be a string or a list of blocks",
    ),
]


class InputMessage(RequestModel):
    role: Literal["user", "assistant", "system"]
    content: MessageContent


InputMessages = TypeAliasType(
    "InputMessages", Annotated[list[InputMessage], FailFast(), Field(min_length=1)]
)


class AnthropicTool(RequestModel):
    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


def _tool_kind(value: Any) -> str | None:
    kind = value.get("type", "custom") if isinstance(value, dict) else 0
    if kind is None or kind == "custom":
        return "<custom>"
    return "<unserved>" if isinstance(kind, str) else None


MessagesTool = Annotated[
    Annotated[AnthropicTool, Tag("<custom>")] | Annotated[UnservedTool, Tag("<unserved>")],
    Discriminator(
        _tool_kind,
        custom_error_type="tool_type",
        custom_error_message="Input should be a tool",
    ),
]
MessagesTools = TypeAliasType("MessagesTools", Annotated[list[MessagesTool], FailFast()])


class AnthropicToolChoice(RequestModel):
    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(RequestModel):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1)


class SchemaOutput(RequestModel):
    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestModel):
    format: SchemaOutput | None = None
    effort: ReasoningEffort | None = None


class CountTokensRequest(RequestModel):
    model: str
    messages: InputMessages
    system: BlockText | None = None
    tools: MessagesTools | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: SchemaOutput | None = Field(
        None, description="the older name of `output_config.format`"
    )


StopSequences = TypeAliasType("StopSequences", Annotated[list[StopText], FailFast()])


class MessagesRequest(CountTokensRequest):
    max_tokens: int = Field(ge=1)
    stop_sequences: StopSequences | None = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=0, le=2**31 - 1)
    top_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    metadata: dict[str, Any] | None = None


class TextAnswer(ResponseModel):
    type: Literal["text"]
    text: str


class ThinkingAnswer(ResponseModel):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseAnswer(ResponseModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


AnswerBlock = TextAnswer | ThinkingAnswer | ToolUseAnswer
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessagesUsage(ResponseModel):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageBody(ResponseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage


class TokenCount(ResponseModel):
    input_tokens: int


class MessageStart(NamedEvent):
    message: MessageBody


class BlockStart(NamedEvent):
    index: int
    content_block: AnswerBlock


class TextDelta(ResponseModel):
    type: Literal["text_delta"]
    text: str


class ThinkingDelta(ResponseModel):
    type: Literal["thinking_delta"]
    thinking: str


class InputJsonDelta(ResponseModel):
    type: Literal["input_json_delta"]
    partial_json: str


class BlockDelta(NamedEvent):
    index: int
    delta: TextDelta | ThinkingDelta | InputJsonDelta


class BlockStop(NamedEvent):
    index: int


class StopDelta(ResponseModel):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(NamedEvent):
    delta: StopDelta
    usage: MessagesUsage


class MessageStop(NamedEvent):
    pass
