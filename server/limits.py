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
    """Number of tools, and each one's schema; takes as long as their size, up to the limits.

    Args:
        tools: in OpenAI's form.
    """
    at_most(len(tools), limits.max_tools, "tools", "entries")
    for number, tool in enumerate(tools):
        schema = tool["function"].get("parameters") or {}
        parsed_schema(schema, limits, f"tools.{number}.function.parameters")


def check_size(text: str | bytes, limits: LimitsConfig, param: str) -> None:
    size = len(text.encode() if isinstance(text, str) else text)
    if size > limits.max_schema_bytes:
        raise RequestError(
            f"'{param}' has {size} bytes; the limit is {limits.max_schema_bytes}.", param=param
        )


def parsed_schema(schema: str | Mapping[str, Any], limits: LimitsConfig, param: str) -> Any:
    """A JSON schema within the limits, which may be given in JSON. Whether it is one isn't checked.

    Raises:
        RequestError: it is too large, too deep, or text that is not JSON.
    """
    # The size bounds what the walk through it costs.
    check_size(schema if isinstance(schema, str) else pydantic_core.to_json(schema), limits, param)
    if isinstance(schema, str):
        try:
            schema = pydantic_core.from_json(schema)
        except ValueError as error:
            raise RequestError(f"'{param}' is not valid JSON: {error}.", param=param) from error
    if is_deeper(schema, limits.max_schema_depth):
        raise RequestError(
            f"'{param}' is nested too deep; the limit is {limits.max_schema_depth} levels.",
            param=param,
        )
    return schema


def is_deeper(value: Any, limit: int) -> bool:
    """Whether objects and arrays are nested in more levels; found without recursion."""
    level = [value]
    for _ in range(limit + 1):
        nested = [inner for inner in level if isinstance(inner, Mapping | list)]
        if not nested:
            return False
        level = [
            item
            for inner in nested
            for item in (inner.values() if isinstance(inner, Mapping) else inner)
        ]
    return True
