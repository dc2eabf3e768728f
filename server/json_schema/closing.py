"""Objects taken as whole: what names they may hold, however their schemas are put together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum, auto
from typing import Any

from server.json_schema.keywords import Schema
from server.json_schema.references import References

_IN_PLACE = ("$ref", "allOf", "anyOf", "oneOf")
"""Keywords with schemas of the same value."""


class Closing(Enum):
    """Which objects that list properties and leave open what else they hold are taken as whole."""

    NONE = auto()
    BELOW = auto()
    """Those inside the value, but not the value itself."""
    ALL = auto()

    @property
    def inside(self) -> Closing:
        """What it means for the parts of a value."""
        return Closing.NONE if self is Closing.NONE else Closing.ALL

    @property
    def without_this(self) -> Closing:
        return Closing.NONE if self is Closing.NONE else Closing.BELOW


def is_joined(node: Mapping[str, Any]) -> bool:
    """Whether several schemas together describe the value, so that none alone can be closed."""
    parts = [key for key in _IN_PLACE if key in node]
    has_own = "properties" in node or "unevaluatedProperties" in node
    several = parts == ["allOf"] and isinstance(node["allOf"], list) and len(node["allOf"]) > 1
    return len(parts) + has_own > 1 or several


def names_beside(node: Mapping[str, Any], references: References) -> list[str] | None:
    """Names that an object which is closed may hold beside those of its own ``properties``.

    Returns:
        None where it can't be closed: it says itself what else there may be, it lists nothing, or
        it is no more than a choice or a reference, whose schemas are closed each by itself.
    """
    listed = isinstance(node.get("properties"), Mapping)
    if "additionalProperties" in node:
        return None
    if not listed and "unevaluatedProperties" not in node and not is_joined(node):
        return None
    found: list[str] = []
    seen: set[str] = set()
    for part in _parts(node, references, seen):
        names = _names(part, references, seen)
        if names is None:
            return None
        found += names
    return found if found or listed or "unevaluatedProperties" in node else None


def _names(schema: Schema, references: References, seen: set[str]) -> list[str] | None:
    """Names that a schema lists; None: it says itself what else there may be."""
    if isinstance(schema, bool):
        return []
    if "additionalProperties" in schema or "patternProperties" in schema:
        return None
    own = schema.get("properties")
    found = list(own) if isinstance(own, Mapping) else []
    for part in _parts(schema, references, seen):
        names = _names(part, references, seen)
        if names is None:
            return None
        found += names
    return found


def _parts(node: Mapping[str, Any], references: References, seen: set[str]) -> Iterator[Schema]:
    for key in _IN_PLACE:
        value = node.get(key)
        if key == "$ref" and value is not None:
            target = references.pointer_of(value, "/$ref")
            if target not in seen:
                seen.add(target)
                yield references.at(target, "/$ref")
        elif isinstance(value, list):
            yield from (part for part in value if isinstance(part, bool | Mapping))
