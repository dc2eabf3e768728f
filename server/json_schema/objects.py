"""The keywords of objects, in the form in which the grammar compiler enforces them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from server.json_schema.keywords import (
    Schema,
    as_count,
    as_list,
    as_mapping,
    as_schema,
    as_text,
    step,
)
from server.json_schema.patterns import can_be_enforced, matches_listed

Prepare = Callable[[Any, str], "dict[str, Any] | bool"]
"""Of a schema and its JSON pointer."""

_KEYWORDS = frozenset(
    {
        *("properties", "required", "additionalProperties", "patternProperties"),
        *("propertyNames", "minProperties", "maxProperties"),
    }
)
_NAME_KEYWORDS = frozenset({"pattern", "minLength", "maxLength", "enum", "const"})
_BEYOND_NAMES = frozenset({"allOf", "anyOf", "oneOf", "not", "if", "$ref"})


class ObjectKeywords:
    """Works on the keywords of one schema."""

    def __init__(
        self,
        node: Mapping[str, Any],
        pointer: str,
        *,
        prepare: Prepare,
        report: Callable[..., None],
        resolve: Callable[[Schema], Schema],
    ) -> None:
        """
        Args:
            report: told of a keyword that is not enforced, and which of its entries.
            resolve: follows references.
        """
        self._node = node
        self._pointer = pointer
        self._prepare = prepare
        self._report = report
        self._resolve = resolve
        self._required: list[str] = []
        self._properties: dict[str, dict[str, Any] | bool] = {}
        self._patterns: dict[str, dict[str, Any] | bool] = {}
        self._additional: dict[str, Any] | bool = True

    def prepared(self, *, closed_over: Iterable[str] | None) -> dict[str, Any]:
        """
        Args:
            closed_over: names beside the listed ones that the object may have, if it is to be
                taken as whole; None: it stays as open as it is.
        """
        if not _KEYWORDS & self._node.keys() and closed_over is None:
            return {}
        self._read()
        self._list_patterns()
        if "propertyNames" in self._node:
            self._restrict_names()
        if closed_over is not None:
            self._close(closed_over)
        out: dict[str, Any] = {}
        if self._properties:
            out["properties"] = self._properties
        if self._patterns:
            out["patternProperties"] = self._patterns
        if self._additional is not True:
            out["additionalProperties"] = self._additional
        if self._required:
            out["required"] = self._required
        return out | self._counts()

    def _read(self) -> None:
        node, place = self._node, self._pointer
        for name, schema in as_mapping(
            node.get("properties", {}), step(place, "properties")
        ).items():
            self._properties[name] = self._prepare(schema, step(place, "properties", name))
        patterns = node.get("patternProperties", {})
        for pattern, schema in as_mapping(patterns, step(place, "patternProperties")).items():
            self._patterns[pattern] = self._prepare(
                schema, step(place, "patternProperties", pattern)
            )
        if "additionalProperties" in node:
            where = step(place, "additionalProperties")
            additional = self._prepare(node["additionalProperties"], where)
            self._additional = True if additional == {} else additional
        where = step(place, "required")
        for index, name in enumerate(as_list(node.get("required", []), where)):
            self._required.append(as_text(name, step(where, index)))

    def _list_patterns(self) -> None:
        """A key that is listed comes once; one that only matches a pattern may come again."""
        for pattern in list(self._patterns):
            names = matches_listed(pattern)
            if names is not None:
                schema = self._patterns.pop(pattern)
                for name in names:
                    listed = self._properties.get(name)
                    both = schema if listed is None else {"allOf": [listed, schema]}
                    self._properties[name] = both
            elif not can_be_enforced(pattern):
                del self._patterns[pattern]
                if self._additional is not False:
                    self._report("patternProperties", pattern)

    def _restrict_names(self) -> None:
        where = step(self._pointer, "propertyNames")
        names = self._resolve(as_schema(self._node["propertyNames"], where))
        if names is True or (isinstance(names, Mapping) and not _says_anything(names)):
            return
        if names is False:
            self._properties, self._patterns, self._additional = {}, {}, False
            return
        allowed = _listed_names(names)
        if allowed is not None and not self._patterns:
            listed = {name: self._properties.get(name, self._additional) for name in allowed}
            self._properties = {n: s for n, s in self._properties.items() if n in listed}
            self._properties |= {n: s for n, s in listed.items() if s is not False}
            self._additional = False
            return
        pattern = None if self._patterns else _name_pattern(names)
        if pattern is None or not self._all_match(pattern):
            self._report("propertyNames")
        elif self._additional is not False:
            self._patterns = {pattern: self._additional}
            self._additional = False

    def _all_match(self, pattern: str) -> bool:
        """Whether all listed names match; an expression that only others read is no match."""
        try:
            return all(re.search(pattern, name) for name in self._properties)
        except re.error:
            return False

    def _close(self, others: Iterable[str]) -> None:
        for name in (*others, *self._required):
            self._properties.setdefault(name, True)
        self._additional = False

    def _counts(self) -> dict[str, Any]:
        """``minProperties`` and ``maxProperties``, which need every listed property required."""
        out: dict[str, Any] = {}
        required = len(set(self._required))
        num_listed = len(self._properties.keys() | set(self._required))
        all_listed = self._additional is False and not self._patterns
        for key in ("minProperties", "maxProperties"):
            if key not in self._node:
                continue
            count = as_count(self._node[key], step(self._pointer, key))
            holds = count <= required if key == "minProperties" else num_listed <= count
            if holds and (key == "minProperties" or all_listed):
                continue
            if num_listed == required:
                out[key] = count
            # A key that is not listed may come twice, and is counted twice.
            if num_listed != required or key == "minProperties":
                self._report(key)
        return out


def _says_anything(names: Mapping[str, Any]) -> bool:
    """Whether a schema of names, which are strings, restricts them."""
    kind = names.get("type", "string")
    is_string = kind == "string" or (isinstance(kind, list) and "string" in kind)
    return not is_string or bool((_NAME_KEYWORDS | _BEYOND_NAMES) & names.keys())


def _listed_names(names: Mapping[str, Any]) -> list[str] | None:
    """All names that a schema allows, where it lists them."""
    if names.keys() & _BEYOND_NAMES or names.keys() & {"minLength", "maxLength"}:
        return None
    if "pattern" in names and not names.keys() & {"enum", "const"}:
        return matches_listed(str(names["pattern"]))
    values = [names["const"]] if "const" in names else names.get("enum")
    if not isinstance(values, list) or "pattern" in names:
        return None
    return [value for value in values if isinstance(value, str)]


def _name_pattern(names: Mapping[str, Any]) -> str | None:
    """One pattern that says as much as a schema of names."""
    keywords = (_NAME_KEYWORDS | _BEYOND_NAMES) & names.keys()
    if keywords == {"pattern"} and isinstance(names["pattern"], str):
        return names["pattern"] if can_be_enforced(names["pattern"]) else None
    if keywords and keywords <= {"minLength", "maxLength"}:
        shortest, longest = names.get("minLength", 0), names.get("maxLength", "")
        if isinstance(shortest, int) and isinstance(longest, int | str):
            return f"^[\\s\\S]{{{shortest},{longest}}}$"
    return None
