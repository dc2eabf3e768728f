"""From a JSON schema as people send it to one that the grammar compiler can enforce.

What is only an annotation goes; what can be said otherwise is; what can't be enforced is dropped
and reported. All output of the result satisfies the original but for what is reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from server.json_schema.arrays import array_keywords, without_repetition
from server.json_schema.closing import Closing, is_joined, names_beside
from server.json_schema.disjoint import are_disjoint
from server.json_schema.keywords import (
    SchemaError,
    as_count,
    as_list,
    as_schema,
    as_text,
    as_types,
    step,
)
from server.json_schema.numbers import number_keywords
from server.json_schema.objects import ObjectKeywords
from server.json_schema.patterns import can_be_enforced
from server.json_schema.references import References

_FORMATS = frozenset(
    {
        *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6"),
        *("uuid", "uri"),
    }
)
"""Those that the compiler knows. By JSON Schema a format is an annotation."""

_NOT_ENFORCED = frozenset(
    {
        *("contains", "dependentRequired", "dependentSchemas", "dependencies"),
        "unevaluatedItems",
    }
)
_REFUSED = ("$dynamicRef", "$recursiveRef")


@dataclass(frozen=True, slots=True)
class PreparedSchema:
    schema: dict[str, Any]
    not_enforced: tuple[str, ...]
    """JSON pointers of the keywords that the output may violate."""


def prepare_schema(schema: Any, *, closed: bool = False, at: str = "") -> PreparedSchema:
    """
    Args:
        schema: of JSON types, and not nested so deep that recursion fails.
        closed: whether every object that lists properties may hold no others, unless it says so.
        at: the JSON pointer of the part to prepare, for itself.

    Raises:
        SchemaError: it is no schema, or leads out of itself.
    """
    if not isinstance(schema, Mapping):
        raise SchemaError("", "a JSON schema must be an object")
    return _Preparation(schema).run(at, Closing.ALL if closed else Closing.NONE)


class _Preparation:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._references = References(root)
        self._names: dict[tuple[str, Closing], str] = {}
        """Definitions of the result by what they are made of."""
        self._not_enforced: dict[str, None] = {}

    def run(self, pointer: str, closing: Closing) -> PreparedSchema:
        prepared = self._schema(self._references.at(pointer, pointer), pointer, closing)
        if isinstance(prepared, bool):
            prepared = {"anyOf": [prepared]}
        definitions: dict[str, Any] = {}
        # Preparing one may ask for more.
        while len(definitions) < len(self._names):
            (target, mode), name = list(self._names.items())[len(definitions)]
            definitions[name] = self._schema(self._references.at(target, target), target, mode)
        if definitions:
            prepared["$defs"] = definitions
        return PreparedSchema(prepared, tuple(self._not_enforced))

    def _schema(self, schema: Any, pointer: str, closing: Closing) -> dict[str, Any] | bool:
        schema = as_schema(schema, pointer)
        if isinstance(schema, bool):
            return schema
        # Generators write null for a keyword that they don't use.
        node = {key: value for key, value in schema.items() if value is not None or key == "const"}
        if node.get("not") in (True, {}):
            return False
        self._check_keywords(node, pointer)
        out = self._values(node, pointer)
        types = as_types(out["type"], pointer) if "type" in out else None
        out |= number_keywords(node, types, pointer)
        out |= self._strings(node, pointer)
        parts = self._arrays(node, types, pointer, closing, out)
        unevaluated = node.get("unevaluatedProperties")
        names = None
        if closing is Closing.ALL or unevaluated is False:
            names = names_beside(node, self._references)
        if not (
            unevaluated in (None, True, {})
            or "additionalProperties" in node
            or (unevaluated is False and names is not None)
        ):
            self._report(pointer, "unevaluatedProperties")
        objects = ObjectKeywords(
            node,
            pointer,
            prepare=lambda value, place: self._schema(value, place, closing.inside),
            report=lambda *keys: self._report(pointer, *keys),
            resolve=self._references.resolve,
        )
        out |= objects.prepared(closed_over=names)
        parts += self._in_place(node, pointer, closing.without_this if is_joined(node) else closing)
        return _joined(out, parts)

    def _check_keywords(self, node: Mapping[str, Any], pointer: str) -> None:
        for keyword in _REFUSED:
            if keyword in node:
                raise SchemaError(step(pointer, keyword), "this kind of reference is not supported")
        for keyword in _NOT_ENFORCED & node.keys():
            self._report(pointer, keyword)
        if node.get("not", False) is not False:
            self._report(pointer, "not")
        if "if" in node and node.keys() & {"then", "else"}:
            self._report(pointer, "if")

    def _values(self, node: Mapping[str, Any], pointer: str) -> dict[str, Any]:
        out: dict[str, Any] = {}
        if "type" in node:
            as_types(node["type"], step(pointer, "type"))
            out["type"] = node["type"]
        if "enum" in node:
            where = step(pointer, "enum")
            out["enum"] = as_list(node["enum"], where)
            if not out["enum"]:
                raise SchemaError(where, "an empty list allows no value")
        if "const" in node:
            out["const"] = node["const"]
        return out

    def _strings(self, node: Mapping[str, Any], pointer: str) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key in ("minLength", "maxLength"):
            if key in node:
                out[key] = as_count(node[key], step(pointer, key))
        if "pattern" in node:
            pattern = as_text(node["pattern"], step(pointer, "pattern"))
            if can_be_enforced(pattern):
                out["pattern"] = pattern
            else:
                self._report(pointer, "pattern")
        if node.get("format") in _FORMATS:
            out["format"] = node["format"]
        return out

    def _arrays(
        self,
        node: Mapping[str, Any],
        types: list[str] | None,
        pointer: str,
        closing: Closing,
        out: dict[str, Any],
    ) -> list[tuple[str, Any]]:
        """Adds the keywords of arrays to `out`; returns schemas that the value must satisfy too."""
        keywords = array_keywords(
            node, pointer, lambda value, place: self._schema(value, place, closing.inside)
        )
        out |= keywords
        if node.get("uniqueItems") is not True or (types is not None and "array" not in types):
            return []
        changed, alternatives, is_unique = without_repetition(
            node, keywords, types, pointer, self._references.resolve
        )
        out |= changed
        if not is_unique:
            self._report(pointer, "uniqueItems")
        return [("anyOf", alternatives)] if alternatives else []

    def _in_place(
        self, node: Mapping[str, Any], pointer: str, closing: Closing
    ) -> list[tuple[str, Any]]:
        """Keywords with schemas of the same value."""
        found: list[tuple[str, Any]] = []
        if "$ref" in node:
            target = self._references.pointer_of(node["$ref"], step(pointer, "$ref"))
            self._references.at(target, step(pointer, "$ref"))
            name = self._names.setdefault((target, closing), f"d{len(self._names)}")
            found.append(("$ref", f"#/$defs/{name}"))
        for key in ("allOf", "anyOf", "oneOf"):
            if key not in node:
                continue
            where = step(pointer, key)
            schemas = as_list(node[key], where)
            if not schemas and key != "allOf":
                raise SchemaError(where, "an empty list allows no value")
            prepared = [self._schema(s, step(where, n), closing) for n, s in enumerate(schemas)]
            if key == "oneOf" and not are_disjoint(schemas, self._references.resolve):
                self._report(pointer, key)
            if prepared:
                found.append(("anyOf" if key == "oneOf" else key, prepared))
        return found

    def _report(self, pointer: str, *keys: str) -> None:
        self._not_enforced[step(pointer, *keys)] = None


def _joined(keywords: dict[str, Any], parts: list[tuple[str, Any]]) -> dict[str, Any]:
    """A schema with further keywords; what comes twice is said in ``allOf``."""
    surplus: list[Any] = []
    for key, value in parts:
        if key == "allOf":
            surplus += value
        elif key in keywords:
            surplus.append({key: value})
        else:
            keywords[key] = value
    if surplus:
        keywords["allOf"] = surplus
    return keywords
