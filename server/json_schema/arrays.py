"""The keywords of arrays, in the form in which the grammar compiler enforces them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from server.json_schema.keywords import (
    TYPES,
    Schema,
    SchemaError,
    as_count,
    as_list,
    step,
)
from server.json_schema.objects import Prepare

_MAX_ARRANGED = 4
"""Distinct values of which every sequence without repetition is listed."""


def array_keywords(node: Mapping[str, Any], pointer: str, prepare: Prepare) -> dict[str, Any]:
    """Items and their number; the lists of older drafts become ``prefixItems``."""
    out: dict[str, Any] = {}
    first, rest = "prefixItems", "items"
    if isinstance(node.get("items"), list):
        first, rest = "items", "additionalItems"
    if first in node:
        where = step(pointer, first)
        items = as_list(node[first], where)
        if items:
            out["prefixItems"] = [prepare(item, step(where, n)) for n, item in enumerate(items)]
    if rest in node:
        out["items"] = prepare(node[rest], step(pointer, rest))
    for key in ("minItems", "maxItems"):
        if key in node:
            out[key] = as_count(node[key], step(pointer, key))
    return out


def without_repetition(
    node: Mapping[str, Any],
    keywords: Mapping[str, Any],
    types: Sequence[str] | None,
    pointer: str,
    resolve: Callable[[Schema], Schema],
) -> tuple[dict[str, Any], list[Schema], bool]:
    """What ``uniqueItems`` comes to, which no grammar can say of arbitrary values.

    Args:
        keywords: of arrays, as `array_keywords` has them.
        types: that the value may have; None: any.
        resolve: follows references.

    Returns:
        Keywords that change, alternatives of which the value must be one (none: it is free), and
        whether repetition is excluded.
    """
    longest = keywords.get("maxItems")
    if keywords.get("items") is False:
        num_listed = len(keywords.get("prefixItems", ()))
        longest = num_listed if longest is None else min(longest, num_listed)
    if longest is not None and longest <= 1:
        return {}, [], True
    items = node.get("items")
    values = None if "prefixItems" in keywords else _all_values(items, resolve)
    if values is None:
        return {}, [], False
    longest = len(values) if longest is None else min(longest, len(values))
    shortest = keywords.get("minItems", 0)
    if shortest > longest:
        raise SchemaError(step(pointer, "uniqueItems"), "there are too few distinct items")
    if len(values) > _MAX_ARRANGED:
        return {"maxItems": longest}, [], False
    arrays: list[Schema] = [
        {
            "type": "array",
            "prefixItems": [{"const": value} for value in sequence],
            "items": False,
            "minItems": length,
        }
        for length in range(shortest, longest + 1)
        for sequence in itertools.permutations(values, length)
    ]
    others = set(TYPES if types is None else types) - {"array"}
    return {}, [*arrays, *({"type": name} for name in sorted(others))], True


def _all_values(schema: Any, resolve: Callable[[Schema], Schema]) -> list[Any] | None:
    """All values that a schema allows, without repetition, where it lists them."""
    if not isinstance(schema, Mapping):
        return None
    found = resolve(schema)
    if isinstance(found, bool):
        return None
    if "const" in found:
        values = [found["const"]]
    elif isinstance(found.get("enum"), list):
        values = found["enum"]
    else:
        values = {"boolean": [False, True], "null": [None]}.get(str(found.get("type")))  # type: ignore[assignment]
    if values is None or any(isinstance(value, list | dict | float) for value in values):
        return None
    return list({json.dumps(value): value for value in values}.values())
