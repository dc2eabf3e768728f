"""Checks of what one request asks for against the configured limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pydantic_core

from engine.config import LimitsConfig
from engine.request import RequestError


def at_most(value: int, limit: int, param: str, unit: str) -> None:
    """
    Raises:
        RequestError: the value is greater; names the field and the limit.
    """
    if value > limit:
        raise RequestError(f"'{param}' asks for {value} {unit}; the limit is {limit}.", param=param)


def check_stops(stops: Sequence[str], limits: LimitsConfig) -> None:
    at_most(len(stops), limits.max_stops, "stop", "entries")
    at_most(max(map(len, stops), default=0), limits.max_stop_length, "stop", "characters")


def check_tools(tools: Sequence[Mapping[str, Any]], limits: LimitsConfig) -> None:
    """
    Args:
        tools: in OpenAI's form.
    """
    at_most(len(tools), limits.max_tools, "tools", "entries")
    for number, tool in enumerate(tools):
        schema = tool["function"].get("parameters") or {}
        check_schema_depth(schema, limits, f"tools.{number}.function.parameters")


def check_schema_text(text: str, limits: LimitsConfig, param: str) -> None:
    """The depth of a JSON schema in JSON; whether it is one is not checked."""
    try:
        schema = pydantic_core.from_json(text)
    except ValueError as error:
        raise RequestError(f"'{param}' is not valid JSON: {error}.", param=param) from error
    check_schema_depth(schema, limits, param)


def check_schema_depth(schema: Any, limits: LimitsConfig, param: str) -> None:
    at_most(_depth(schema), limits.max_schema_depth, param, "levels")


def _depth(value: Any) -> int:
    """Levels of nested objects and arrays; found without recursion."""
    deepest = 0
    pending = [(value, 1)]
    while pending:
        inner, level = pending.pop()
        if isinstance(inner, Mapping):
            inner = inner.values()
        elif not isinstance(inner, list):
            continue
        deepest = max(deepest, level)
        pending.extend((item, level + 1) for item in inner)
    return deepest
