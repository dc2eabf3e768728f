"""Bounds of numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from server.json_schema.keywords import SchemaError, as_number, step

FARTHEST = 2**62
"""No integer without bounds of its own goes farther: 19 digits, room for the ids that are in use.
A model that has nothing to say goes on with digits for ever; nor does the compiler go farther."""

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def number_keywords(
    node: Mapping[str, Any], types: list[str] | None, pointer: str
) -> dict[str, Any]:
    """The keywords of numbers, integers without bounds given some, draft 4's booleans resolved."""
    out = _given_bounds(node, pointer)
    if "multipleOf" in node:
        divisor = as_number(node["multipleOf"], step(pointer, "multipleOf"))
        if divisor <= 0:
            raise SchemaError(step(pointer, "multipleOf"), "it must be greater than 0")
        out["multipleOf"] = divisor
    for name, value in out.items():
        if name in _BOUNDS and abs(value) > FARTHEST and _is_outward(name, value):
            out[name] = FARTHEST if value > 0 else -FARTHEST
    is_integer = types is not None and "integer" in types and "number" not in types
    if is_integer and "enum" not in node and "const" not in node:
        lowest, highest = _ends(out)
        if lowest is None and (highest is None or highest > -FARTHEST):
            out["minimum"] = -FARTHEST
        if highest is None and (lowest is None or lowest < FARTHEST):
            out["maximum"] = FARTHEST
    return out


def _given_bounds(node: Mapping[str, Any], pointer: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name in _BOUNDS:
        if name in node and not isinstance(node[name], bool):
            out[name] = as_number(node[name], step(pointer, name))
    for plain, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if node.get(exclusive) is True and plain in out:
            out[exclusive] = out.pop(plain)
    return out


def _is_outward(name: str, value: float) -> bool:
    """Whether a far bound only lets more in, so that a nearer one loses nothing of use."""
    return (value > 0) == name.lower().endswith("maximum")


def _ends(bounds: Mapping[str, Any]) -> tuple[float | None, float | None]:
    lowest = bounds.get("minimum", bounds.get("exclusiveMinimum"))
    return lowest, bounds.get("maximum", bounds.get("exclusiveMaximum"))
