"""The chat API's old form of tools: `functions` and `function_call`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.request import RequestError
from server.apis.chat.schema import ChatRequest
from server.apis.shared.schema.tools import (
    AllowedToolsChoice,
    NamedFunction,
    NamedToolChoice,
    Tool,
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
