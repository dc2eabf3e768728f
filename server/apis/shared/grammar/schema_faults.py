"""Says which part of a schema the grammar compiler has refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.request import GrammarSpec, RequestError
from server.context import ServerContext
from server.json_schema.keywords import SchemaError, step
from server.json_schema.prepare import prepare_schema
from server.json_schema.references import References

_MAX_TRIALS = 40
"""Compilations spent on looking for the part."""
_OF_ONE = ("additionalProperties", "items", "additionalItems", "unevaluatedProperties")
_OF_SEVERAL = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")


@dataclass(frozen=True, slots=True)
class Suspect:
    """A schema that may be at fault."""

    param: str
    subject: str
    """Whose schema it is, as the beginning of what is said about it."""
    schema: Mapping[str, Any]
    strict: bool


async def explained(
    error: RequestError, suspects: Sequence[Suspect], context: ServerContext
) -> RequestError:
    """The error with the place of what it is about, where that is found in time.

    Args:
        error: what the compilation of all suspects together has raised.
    """
    limit = context.config.limits.max_schema_seconds
    trials = _Trials(context)
    try:
        async with asyncio.timeout(limit):
            for suspect in suspects:
                reason = await trials.fault(suspect, "")
                if reason is not None:
                    return await _located(trials, suspect, reason)
    except TimeoutError:
        pass
    return error


class _Trials:
    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._num_left = _MAX_TRIALS

    async def fault(self, suspect: Suspect, pointer: str) -> str | None:
        """Why a part of a schema can't be used by itself; None: it can, or is not tried."""
        if not self._num_left:
            return None
        self._num_left -= 1
        try:
            prepared = prepare_schema(suspect.schema, closed=suspect.strict, at=pointer)
            spec = GrammarSpec("json_schema", json.dumps(prepared.schema))
            limit = self._context.config.limits.max_schema_seconds
            await self._context.engine.compile_grammar(spec, time_limit=limit)
        except (RequestError, SchemaError) as error:
            return str(error)
        return None


async def _located(trials: _Trials, suspect: Suspect, reason: str) -> RequestError:
    place, part = "", suspect.schema
    references = References(suspect.schema)
    seen = {place}
    found = True
    while found:
        found = False
        for pointer, inner in _parts(part, place, references):
            if pointer in seen:
                continue
            seen.add(pointer)
            inner_reason = await trials.fault(suspect, pointer)
            if inner_reason is not None:
                place, part, reason, found = pointer, inner, inner_reason, True
                break
    where = f"at '{place}': " if place else ""
    return RequestError(
        f"Invalid value for '{suspect.param}': {suspect.subject}{where}{reason}",
        param=suspect.param,
    )


def _parts(
    schema: Mapping[str, Any], pointer: str, references: References
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The schemas in a schema, one level down, and what it refers to."""
    if "$ref" in schema:
        target = references.pointer_of(schema["$ref"], pointer)
        meant = references.at(target, pointer)
        if isinstance(meant, Mapping):
            yield target, meant
    for key in _BY_NAME:
        members = schema.get(key)
        if isinstance(members, Mapping):
            yield from ((step(pointer, key, n), m) for n, m in members.items() if _is_object(m))
    for key in _OF_SEVERAL:
        members = schema.get(key)
        if isinstance(members, list):
            yield from ((step(pointer, key, n), m) for n, m in enumerate(members) if _is_object(m))
    for key in _OF_ONE:
        if _is_object(schema.get(key)):
            yield step(pointer, key), schema[key]


def _is_object(value: Any) -> bool:
    return isinstance(value, Mapping)
