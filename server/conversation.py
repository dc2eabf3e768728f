"""From chat messages and tools to what a chat template is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pydantic_core

from engine.request import ChatOptions, RequestError
from server.schemas.chat import ChatMessage
from server.schemas.content import TextPart
from server.schemas.tools import NamedToolChoice, Tool, ToolCall

TEMPLATE_ROLES = {"developer": "system"}
"""Chat templates know no developer; OpenAI gives its words the system's rank."""

SAFE_TEMPLATE_ARGS: Mapping[str, type] = {
    "enable_thinking": bool,
    "thinking": bool,
    "preserve_thinking": bool,
    "reasoning_effort": str,
}
"""Variables of chat templates that a client may set: they choose a mode, they carry no markup."""

Message = dict[str, Any]


def template_messages(messages: Sequence[ChatMessage]) -> tuple[Message, ...]:
    """
    Raises:
        RequestError: a message lacks what its role needs, or has what its role can't have.
    """
    return tuple(
        _template_message(message, f"messages.{number}") for number, message in enumerate(messages)
    )


def chat_options(
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool] | None,
    *,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    args: Mapping[str, Any] | None,
) -> ChatOptions:
    """
    Raises:
        RequestError: options that exclude each other, or that a client may not set.
    """
    continues = bool(continue_final_message)
    if continues and add_generation_prompt:
        raise RequestError(
            "'add_generation_prompt' and 'continue_final_message' exclude each other.",
            param="add_generation_prompt",
        )
    if continues and messages[-1].role != "assistant":
        raise RequestError(
            "'continue_final_message' needs an assistant message last.",
            param="continue_final_message",
        )
    return ChatOptions(
        tools=template_tools(tools),
        add_generation_prompt=not continues and add_generation_prompt is not False,
        continue_final_message=continues,
        template_args=template_args(args),
    )


def template_tools(tools: Sequence[Tool] | None) -> tuple[Mapping[str, Any], ...]:
    """
    Raises:
        RequestError: two tools share a name.
    """
    names: set[str] = set()
    for number, tool in enumerate(tools or ()):
        if tool.function.name in names:
            raise RequestError(
                f"Two tools are called {tool.function.name!r}.",
                param=f"tools.{number}",
            )
        names.add(tool.function.name)
    return tuple(tool.model_dump(exclude_none=True) for tool in tools or ())


def template_args(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """
    Raises:
        RequestError: a variable that clients may not set, or a value of the wrong type.
    """
    for name, value in (given or {}).items():
        param = f"chat_template_kwargs.{name[:64]}"
        if name not in SAFE_TEMPLATE_ARGS:
            known = ", ".join(SAFE_TEMPLATE_ARGS)
            raise RequestError(f"'{param}' is not one of {known}.", param=param)
        if type(value) is not SAFE_TEMPLATE_ARGS[name]:
            wanted = "boolean" if SAFE_TEMPLATE_ARGS[name] is bool else "string"
            raise RequestError(f"Invalid value for '{param}': should be a {wanted}.", param=param)
    return dict(given or {})


def parsed_arguments(arguments: str, param: str) -> dict[str, Any]:
    """A tool call's arguments, which are an object in JSON; templates write them out themselves.

    Raises:
        RequestError: they are not.
    """
    try:
        value = pydantic_core.from_json(arguments or "{}", allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(f"'{param}' is not valid JSON: {error}.", param=param) from error
    if not isinstance(value, dict):
        raise RequestError(f"'{param}' must hold a JSON object.", param=param)
    return value


def active_tools(
    tools: Sequence[Tool] | None, choice: str | NamedToolChoice | None
) -> Sequence[Tool]:
    """The tools that the model may call under a tool choice.

    Raises:
        RequestError: a choice that names no tool, or that there are no tools for.
    """
    if isinstance(choice, NamedToolChoice):
        name = choice.function.name
        if name not in {tool.function.name for tool in tools or ()}:
            raise RequestError(
                f"'tool_choice' names {name!r}, which is none of 'tools'.", param="tool_choice"
            )
    elif choice == "required" and not tools:
        raise RequestError("'tool_choice' is only allowed with 'tools'.", param="tool_choice")
    return () if choice == "none" else tools or ()


def _template_message(message: ChatMessage, param: str) -> Message:
    calls = message.tool_calls or []
    if calls and message.role != "assistant":
        raise _misplaced(f"{param}.tool_calls", "an assistant message")
    if message.content is None and not calls:
        raise _missing_content(message, param)
    answer: Message = {
        "role": TEMPLATE_ROLES.get(message.role, message.role),
        "content": _text(message.content),
    }
    if message.role == "tool":
        if message.tool_call_id is None:
            raise RequestError(
                f"Missing required parameter: '{param}.tool_call_id'.",
                param=f"{param}.tool_call_id",
            )
        answer["tool_call_id"] = message.tool_call_id
        if message.name is not None:
            answer["name"] = message.name
    elif message.tool_call_id is not None:
        raise _misplaced(f"{param}.tool_call_id", "a tool message")
    if message.role == "assistant" and message.reasoning_content:
        answer["reasoning_content"] = message.reasoning_content
    if calls:
        answer["tool_calls"] = [
            _template_call(call, f"{param}.tool_calls.{number}")
            for number, call in enumerate(calls)
        ]
    return answer


def _template_call(call: ToolCall, param: str) -> dict[str, Any]:
    arguments = parsed_arguments(call.function.arguments, f"{param}.function.arguments")
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _text(content: str | Sequence[TextPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text for part in content)


def _missing_content(message: ChatMessage, param: str) -> RequestError:
    param = f"{param}.content"
    if "content" not in message.model_fields_set:
        return RequestError(f"Missing required parameter: '{param}'.", param=param)
    return RequestError(
        f"'{param}' may be null only in an assistant message with tool calls.", param=param
    )


def _misplaced(param: str, place: str) -> RequestError:
    return RequestError(f"'{param}' is only allowed in {place}.", param=param)
