"""References inside one schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from server.json_schema.keywords import Schema, SchemaError, as_schema, as_text, step

_MAX_CHAIN = 64


class References:
    """Finds what the references of a schema mean. Nothing outside it is looked up."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._anchors: dict[str, str] | None = None

    def pointer_of(self, reference: Any, pointer: str) -> str:
        """The JSON pointer that a ``$ref`` means.

        Args:
            pointer: of the ``$ref`` itself.

        Raises:
            SchemaError: it leads out of the schema.
        """
        text = as_text(reference, pointer)
        base, _, fragment = text.partition("#")
        if base and base != str(self._root.get("$id", "")).rstrip("#"):
            raise SchemaError(pointer, f"{text!r} is outside the schema, and nothing is fetched")
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            if fragment not in self._by_anchor:
                raise SchemaError(pointer, f"nothing has the anchor {fragment!r}")
            return self._by_anchor[fragment]
        return fragment

    def at(self, target: str, pointer: str) -> Schema:
        """The schema that a JSON pointer leads to.

        Raises:
            SchemaError: it leads to none; names `pointer`, where the reference is.
        """
        found: Any = self._root
        for escaped in target.split("/")[1:]:
            key = escaped.replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping) and key in found:
                found = found[key]
            elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            else:
                raise SchemaError(pointer, f"'#{target}' does not exist")
        return as_schema(found, target)

    def resolve(self, schema: Schema) -> Schema:
        """What a schema that is nothing but a reference means; else the schema itself."""
        for _ in range(_MAX_CHAIN):
            if isinstance(schema, bool) or "$ref" not in schema:
                break
            schema = self.at(self.pointer_of(schema["$ref"], ""), "")
        return schema

    @property
    def _by_anchor(self) -> dict[str, str]:
        if self._anchors is None:
            self._anchors = dict(_anchors(self._root))
        return self._anchors


def _anchors(root: Any) -> Iterator[tuple[str, str]]:
    pending = [(root, "")]
    while pending:
        value, pointer = pending.pop()
        if isinstance(value, Mapping):
            if isinstance(value.get("$anchor"), str):
                yield value["$anchor"], pointer
            pending.extend((inner, step(pointer, key)) for key, inner in value.items())
        elif isinstance(value, list):
            pending.extend((inner, step(pointer, index)) for index, inner in enumerate(value))
