"""The input of /v1/responses: messages, calls, their outputs and reasoning as items."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Discriminator, FailFast, Field, Tag
from typing_extensions import TypeAliasType

from server.apis.shared.schema.base import RequestModel
from server.apis.shared.schema.content import refusal_as_text
from server.apis.shared.schema.tools import FunctionName
from server.apis.shared.schema.union import by_json_type


class InputText(RequestModel):
    type: Literal["input_text", "output_text", "text"]
    text: str


InputTexts = TypeAliasType(
    "InputTexts",
    Annotated[list[Annotated[InputText, BeforeValidator(refusal_as_text)]], FailFast()],
)


ItemContent = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[InputTexts, Tag("<parts>")],
    by_json_type(
        {str: "<text>", list: "<parts>"},
        error_type="content_type",
        message="Input should be a string or a list of text parts",
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


class InputCustomCall(RequestModel):
    """A call of a tool that takes plain text."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: FunctionName
    input: str


class InputShellCall(RequestModel):
    type: Literal["local_shell_call"]
    call_id: str
    action: dict[str, Any]


class InputCallOutput(RequestModel):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: ItemContent


class ReasoningText(RequestModel):
    type: Literal["reasoning_text", "text"]
    text: str


ReasoningTexts = TypeAliasType("ReasoningTexts", Annotated[list[ReasoningText], FailFast()])


class InputReasoning(RequestModel):
    """Of its summary, or of what another server has encrypted, the model is told nothing."""

    type: Literal["reasoning"]
    content: ReasoningTexts | None = None


HostedKind = Literal[
    "web_search_call",
    "file_search_call",
    "code_interpreter_call",
    "image_generation_call",
    "mcp_list_tools",
    "tool_search_call",
    "tool_search_output",
]


class HostedCall(RequestModel):
    """What another server's own tools did, told to its client; the model is told nothing of it."""

    type: HostedKind


_ITEM_KINDS = {
    "message": "message",
    "function_call": "function_call",
    "custom_tool_call": "custom_tool_call",
    "local_shell_call": "local_shell_call",
    "function_call_output": "output",
    "custom_tool_call_output": "output",
    "reasoning": "reasoning",
    **dict.fromkeys(get_args(HostedKind), "hosted"),
}


def _item_kind(value: Any) -> str | None:
    kind = value.get("type", "message") if isinstance(value, dict) else None
    return f"<{_ITEM_KINDS[kind]}>" if isinstance(kind, str) and kind in _ITEM_KINDS else None


InputItem = Annotated[
    Annotated[InputMessage, Tag("<message>")]
    | Annotated[InputCall, Tag("<function_call>")]
    | Annotated[InputCustomCall, Tag("<custom_tool_call>")]
    | Annotated[InputShellCall, Tag("<local_shell_call>")]
    | Annotated[InputCallOutput, Tag("<output>")]
    | Annotated[InputReasoning, Tag("<reasoning>")]
    | Annotated[HostedCall, Tag("<hosted>")],
    Discriminator(
        _item_kind,
        custom_error_type="item_type",
        custom_error_message=f"Input should be an item of type {', '.join(_ITEM_KINDS)}",
    ),
]
InputItems = TypeAliasType(
    "InputItems", Annotated[list[InputItem], FailFast(), Field(min_length=1)]
)


ResponseInput = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[InputItems, Tag("<items>")],
    by_json_type(
        {str: "<text>", list: "<items>"},
        error_type="input_type",
        message="Input should be a string or a list of items",
    ),
]
