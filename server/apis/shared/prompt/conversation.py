"""From chat messages and tools to what a chat template is given."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pydantic_core

from engine.request import ChatOptions, RequestError
from server.apis.chat.schema import ChatMessage
from server.apis.shared.schema.content import TextPart
from server.apis.shared.schema.tools import AllowedToolsChoice, NamedToolChoice, Tool

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


def effort_args(effort: str | None) -> dict[str, Any]:
    """The variables by which templates choose how much a model thinks; each knows its own."""
    if effort is None:
        return {}
    thinks = effort != "none"
    return {"enable_thinking": thinks, "thinking": thinks, "reasoning_effort": effort}


def call_arguments(arguments: str) -> dict[str, Any] | None:
    """A call's arguments as templates want them, who write them out themselves.

    Returns:
        None: they are no JSON object, as where the token limit has cut them off.
    """
    try:
        value = pydantic_core.from_json(arguments or "{}", allow_inf_nan=False)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def add_call(answer: Message, call_id: str, name: str, arguments: Mapping[str, Any]) -> None:
    """Put a call into an assistant's message."""
    function = {"name": name, "arguments": arguments}
    call = {"id": call_id, "type": "function", "function": function}
    answer.setdefault("tool_calls", []).append(call)


def add_written_call(answer: Message, call_id: str, name: str, arguments: str) -> None:
    """The same for a call as the model wrote it.

    Arguments that are no JSON object can be given to no template that looks into them: with them
    the call stands as text, which is how the model would have gone on.
    """
    value = call_arguments(arguments)
    if value is not None:
        add_call(answer, call_id, name, value)
        return
    call = f'{{"name": {json.dumps(name)}, "arguments": {arguments}'
    answer["content"] = "\n".join(text for text in (answer["content"], call) if text)


@dataclass(frozen=True, slots=True)
class ToolSelection:
    """What the model may call."""

    tools: Sequence[Tool]
    choice: str | NamedToolChoice | None


def select_tools(
    tools: Sequence[Tool] | None, choice: str | NamedToolChoice | AllowedToolsChoice | None
) -> ToolSelection:
    """What a tool choice leaves of the tools.

    Raises:
        RequestError: a choice that names no tool, or that there are no tools for.
    """
    known = {tool.function.name: tool for tool in tools or ()}
    if isinstance(choice, AllowedToolsChoice):
        names = [named.function.name for named in choice.allowed_tools.tools]
        _require_known(names, known)
        tools = [known[name] for name in dict.fromkeys(names)]
        choice = choice.allowed_tools.mode
    elif isinstance(choice, NamedToolChoice):
        _require_known([choice.function.name], known)
    if choice == "required" and not tools:
        raise RequestError("'tool_choice' is only allowed with 'tools'.", param="tool_choice")
    return ToolSelection(() if choice == "none" else tools or (), choice)


def _require_known(names: Sequence[str], known: Mapping[str, Tool]) -> None:
    for name in names:
        if name not in known:
            raise RequestError(
                f"'tool_choice' names {name!r}, which is none of 'tools'.", param="tool_choice"
            )


def _template_message(message: ChatMessage, param: str) -> Message:
    calls = message.tool_calls or []
    if calls and message.role != "assistant":
        raise _misplaced(f"{param}.tool_calls", "an assistant message")
    if message.content is None and message.refusal is None and not calls:
        raise _missing_content(message, param)
    content = _text(message.refusal if message.content is None else message.content)
    answer: Message = {
        "role": TEMPLATE_ROLES.get(message.role, message.role),
        "content": content,
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
