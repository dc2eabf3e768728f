"""Tools, the choice among them and calls of them, as OpenAI's chat API writes them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, FailFast, Field, Tag
from typing_extensions import TypeAliasType

from server.apis.shared.schema.base import RequestModel, ResponseModel

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class FunctionSpec(RequestModel):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of the arguments")
    strict: bool | None = None


class Tool(RequestModel):
    type: Literal["function"]
    function: FunctionSpec


Tools = TypeAliasType("Tools", Annotated[list[Tool], FailFast()])


class NamedFunction(RequestModel):
    name: FunctionName


class NamedToolChoice(RequestModel):
    type: Literal["function"]
    function: NamedFunction


class AllowedTools(RequestModel):
    mode: Literal["auto", "required"]
    tools: list[NamedToolChoice]


class AllowedToolsChoice(RequestModel):
    """Narrows the tools of the request down."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _choice_kind(value: Any) -> str | None:
    if isinstance(value, str):
        return "<mode>"
    if not isinstance(value, dict):
        return None
    return "<allowed>" if value.get("type") == "allowed_tools" else "<named>"


by_mode_or_name = Discriminator(
    _choice_kind,
    custom_error_type="tool_choice_type",
    custom_error_message="Input should be 'none', 'auto', 'required' or name a function",
)

ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<mode>")]
    | Annotated[NamedToolChoice, Tag("<named>")]
    | Annotated[AllowedToolsChoice, Tag("<allowed>")],
    by_mode_or_name,
]


class CalledFunction(RequestModel):
    name: FunctionName
    arguments: str


class ToolCall(RequestModel):
    """A call in an assistant message of a request."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


ToolCalls = TypeAliasType("ToolCalls", Annotated[list[ToolCall], FailFast()])


class FunctionCall(ResponseModel):
    name: str
    arguments: str


class ToolCallAnswer(ResponseModel):
    """A whole call in a response."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class FunctionCallDelta(ResponseModel):
    name: str | None = None
    arguments: str


class ToolCallDelta(ResponseModel):
    """The opening of a call in a stream, which has its id and name, or more of its arguments."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCallDelta


class UnservedTool(RequestModel):
    """A tool of a type that the server lacks."""

    type: str
