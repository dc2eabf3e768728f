"""The tools of a request: those served, those chosen, and how chat templates are given them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from engine.request import RequestError
from server.apis.shared.schema.tools import AllowedToolsChoice, NamedToolChoice, Tool, UnservedTool

logger = logging.getLogger(__name__)

T = TypeVar("T")


def served_tools(tools: Sequence[T | UnservedTool] | None) -> list[T]:
    """The tools less those that can't be served, which are named in the log.

    Raises:
        RequestError: no tool is left; names the first one's type.
    """
    served = [tool for tool in tools or () if not isinstance(tool, UnservedTool)]
    for number, tool in enumerate(tools or ()):
        if not isinstance(tool, UnservedTool):
            continue
        if not served:
            param = f"tools.{number}.type"
            raise RequestError(
                f"'{param}': this server has no tools of type {tool.type[:64]!r}.",
                param=param,
                code="unsupported_parameter",
            )
        logger.warning("a tool of type %r is left out: this server has none", tool.type[:64])
    return served


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


def _require_known(names: Sequence[str], known: Mapping[str, Tool]) -> None:
    for name in names:
        if name not in known:
            raise RequestError(
                f"'tool_choice' names {name!r}, which is none of 'tools'.", param="tool_choice"
            )
