"""From chat messages and tools to what a chat template is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.request import ChatOptions, RequestError
from server.apis.shared.prompt.message_builder import (
    TEMPLATE_ROLES,
    Message,
    add_written_call,
    joined_text,
)
from server.apis.shared.prompt.tools import template_tools
from server.apis.shared.schema.messages import ChatMessage
from server.apis.shared.schema.tools import Tool

SAFE_TEMPLATE_ARGS: Mapping[str, type] = {
    "enable_thinking": bool,
    "thinking": bool,
    "preserve_thinking": bool,
    "reasoning_effort": str,
}
"""Variables of chat templates that a client may set: they choose a mode, they carry no markup."""


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
    reasoning_effort: str | None = None,
) -> ChatOptions:
    """
    Args:
        args: variables of the template; they go before what `reasoning_effort` says.

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
        template_args={**effort_args(reasoning_effort), **template_args(args)},
    )


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


def effort_args(effort: str | None) -> dict[str, Any]:
    """The variables by which templates choose how much a model thinks; each knows its own."""
    if effort is None:
        return {}
    thinks = effort != "none"
    return {"enable_thinking": thinks, "thinking": thinks, "reasoning_effort": effort}


def _template_message(message: ChatMessage, param: str) -> Message:
    calls = message.tool_calls or []
    if calls and message.role != "assistant":
        raise _misplaced(f"{param}.tool_calls", "an assistant message")
    if message.content is None and message.refusal is None and not calls:
        raise _missing_content(message, param)
    content = message.refusal if message.content is None else message.content
    answer: Message = {
        "role": TEMPLATE_ROLES.get(message.role, message.role),
        "content": joined_text(content or ""),
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
    for call in calls:
        add_written_call(answer, call.id, call.function.name, call.function.arguments)
    return answer


def _missing_content(message: ChatMessage, param: str) -> RequestError:
    param = f"{param}.content"
    if "content" not in message.model_fields_set:
        return RequestError(f"Missing required parameter: '{param}'.", param=param)
    return RequestError(
        f"'{param}' may be null only in an assistant message with tool calls.", param=param
    )


def _misplaced(param: str, place: str) -> RequestError:
    return RequestError(f"'{param}' is only allowed in {place}.", param=param)
