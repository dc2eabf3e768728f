"""Whether alternatives of a ``oneOf`` exclude each other."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from server.json_schema.keywords import TYPES, Schema, is_number

_MAX_DEPTH = 4

Resolve = Callable[[Schema], Schema]
"""Follows references to the schema that they mean."""


def are_disjoint(schemas: Sequence[Schema], resolve: Resolve) -> bool:
    """Whether no value satisfies two of them, as far as their types, values and tags tell."""
    return all(_disjoint(a, b, resolve, 0) for a, b in itertools.combinations(schemas, 2))


def _disjoint(a: Schema, b: Schema, resolve: Resolve, depth: int) -> bool:
    a, b = resolve(a), resolve(b)
    if isinstance(a, bool) or isinstance(b, bool):
        return a is False or b is False
    types = _types(a) & _types(b)
    if not types:
        return True
    values, others = _values(a), _values(b)
    if values is not None and others is not None and not values & others:
        return True
    return types == {"object"} and depth < _MAX_DEPTH and _objects_differ(a, b, resolve, depth)


def _objects_differ(
    a: Mapping[str, Any], b: Mapping[str, Any], resolve: Resolve, depth: int
) -> bool:
    mine, others = _properties(a), _properties(b)
    required = {name for schema in (a, b) for name in _required(schema)}
    if any(
        _disjoint(mine[name], others[name], resolve, depth + 1)
        for name in required & mine.keys() & others.keys()
    ):
        return True
    return _forbids(b, others, _required(a)) or _forbids(a, mine, _required(b))


def _forbids(schema: Mapping[str, Any], listed: Mapping[str, Any], names: set[str]) -> bool:
    closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    return closed and bool(names - listed.keys())


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else {}


def _required(schema: Mapping[str, Any]) -> set[str]:
    found = schema.get("required")
    return {name for name in found if isinstance(name, str)} if isinstance(found, list) else set()


def _types(schema: Mapping[str, Any]) -> set[str]:
    """Types that a value may have; "number" stands for all but the integers."""
    given = schema.get("type", list(TYPES))
    types = {given} if isinstance(given, str) else set(given) if isinstance(given, list) else set()
    if "number" in types:
        types.add("integer")
    values = _listed(schema)
    return types if values is None else types & {_type_of(value) for value in values}


def _values(schema: Mapping[str, Any]) -> set[str] | None:
    values = _listed(schema)
    if values is None:
        return None
    return {json.dumps(_canonical(value), sort_keys=True) for value in values}


def _listed(schema: Mapping[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _canonical(value: Any) -> Any:
    return float(value) if is_number(value) and abs(value) < 2**53 else value


def _type_of(value: Any) -> str:
    match value:
        case bool():
            return "boolean"
        case None:
            return "null"
        case str():
            return "string"
        case int() | float():
            return "integer" if value == int(value) else "number"
        case list():
            return "array"
    return "object"
