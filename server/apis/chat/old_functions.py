"""The chat API's old form of tools: `functions`, `function_call` and messages of role function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.request import RequestError
from server.apis.chat.schema import ChatMessage, ChatRequest
from server.apis.shared.schema.tools import (
    AllowedToolsChoice,
    NamedFunction,
    NamedToolChoice,
    Tool,
    ToolCall,
)

PARAMS: Mapping[str, str] = {"tools": "functions", "tool_choice": "function_call"}
"""The old names of fields."""


def uses_old_form(body: ChatRequest) -> bool:
    """
    Raises:
        RequestError: it uses both.
    """
    is_old = bool(body.functions) or isinstance(body.function_call, NamedFunction)
    if is_old and (body.tools or body.tool_choice is not None):
        raise RequestError(
            "'functions' and 'function_call' are the old form of 'tools' and 'tool_choice'; "
            "use only one of the two.",
            param="functions",
        )
    return is_old


def tools_and_choice(
    body: ChatRequest,
) -> tuple[Sequence[Tool] | None, str | NamedToolChoice | AllowedToolsChoice | None]:
    """The tools of a request and the choice among them, whichever form it uses."""
    if not uses_old_form(body):
        return body.tools, body.tool_choice
    tools = [Tool(type="function", function=function) for function in body.functions or ()]
    choice = body.function_call
    if isinstance(choice, NamedFunction):
        return tools, NamedToolChoice(type="function", function=choice)
    return tools, choice


def in_new_form(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Messages with calls and results as tools have them; a result belongs to the latest call.

    Raises:
        RequestError: a message has what its role can't have, or a result lacks its function's name.
    """
    converted = []
    call_id = ""
    for number, message in enumerate(messages):
        param = f"messages.{number}"
        if message.function_call is not None:
            if message.role != "assistant" or message.tool_calls:
                raise RequestError(
                    f"'{param}.function_call' is only allowed in an assistant message without "
                    "'tool_calls'.",
                    param=f"{param}.function_call",
                )
            call_id = _call_id(number)
            call = ToolCall(id=call_id, type="function", function=message.function_call)
            message = message.model_copy(update={"tool_calls": [call], "function_call": None})
        elif message.role == "function":
            if message.name is None:
                raise RequestError(
                    f"Missing required parameter: '{param}.name'.", param=f"{param}.name"
                )
            update = {"role": "tool", "tool_call_id": call_id or _call_id(number)}
            message = message.model_copy(update=update)
        converted.append(message)
    return converted


def _call_id(number: int) -> str:
    """Nine letters and digits: some templates refuse all others."""
    return f"call{number:05}"
