"""Schemas whose compilation would take all memory are refused; common ones are not."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from engine.request import GrammarSpec, RequestError
from engine.sampling.schema_cost import why_too_costly
from tests.structured.engines import grammars

BOUNDS = {"minimum": -(10**9), "maximum": 2**63}


def divisible(*divisors: float, **fields: Any) -> dict[str, Any]:
    """A value that all of them divide."""
    return {"allOf": [{"type": "number", "multipleOf": d, **fields} for d in divisors]}


COSTLY = [
    {"type": "integer", "multipleOf": 999_983},
    {"type": "integer", "multipleOf": -999_983},
    {"anyOf": [{"const": ""}, {"type": "integer", "multipleOf": 10**9, **BOUNDS}]},
    {"type": "integer", "multipleOf": 10**40},
    {"type": "number", "multipleOf": 0.99998},
    divisible(997, 991),
    {"type": "object", "properties": {f"p{n}": divisible(97, minimum=n) for n in range(200)}},
]
CHEAP = [
    {"type": "integer", "multipleOf": 10},
    {"type": "integer", "multipleOf": 1000, **BOUNDS},
    {"type": "number", "multipleOf": 0.01},
    {"type": "number", "multipleOf": 1e-7, "minimum": 0},
    {"type": "integer", "multipleOf": 255},
    {"type": "integer", "multipleOf": 9973},
    {"type": "object", "properties": {f"p{n}": {"multipleOf": 5} for n in range(300)}},
    divisible(12, 60, 7),
    {"multipleOf": True},
    {"enum": [{"multipleOf": "x"}]},
]


@pytest.mark.parametrize("schema", COSTLY)
def test_costly_schemas_are_refused(schema: dict[str, Any]) -> None:
    text = json.dumps(schema)
    for spec in (
        GrammarSpec("json_schema", text),
        GrammarSpec("lark", f'start: "x" | %json {text}'),
    ):
        began = time.monotonic()
        with pytest.raises(RequestError, match="multipleOf"):
            grammars().compile(spec)
        assert time.monotonic() - began < 1


@pytest.mark.parametrize("schema", CHEAP)
def test_others_are_not(schema: dict[str, Any]) -> None:
    assert why_too_costly(schema) is None


@pytest.mark.parametrize("schema", CHEAP[:6])
def test_and_they_are_cheap(schema: dict[str, Any]) -> None:
    began = time.monotonic()
    grammars().compile(GrammarSpec("json_schema", json.dumps(schema)))
    assert time.monotonic() - began < 2


def test_deep_schemas_are_read() -> None:
    schema: Any = {"multipleOf": 999_983}
    for _ in range(50_000):
        schema = {"items": [schema]}
    assert why_too_costly(schema) is not None
