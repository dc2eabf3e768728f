"""Grammars of clients: used or refused, and either within a time."""

from __future__ import annotations

import json
import time
from typing import Any

from hypothesis import strategies as st

from engine.request import GrammarKind, GrammarSpec, RequestError
from tests.fuzz.examples import fuzzed
from tests.structured.engines import grammars

SECONDS = 10.0
"""Far over what llguidance's own limits allow; a hang would take longer."""

NAMES = st.sampled_from(["a", "b", "name", "é", "", "$ref", "x" * 40])
NUMBERS = st.integers(-3, 5) | st.sampled_from([10**9, -(10**9), 0.5, 2**63])
PATTERNS = st.one_of(
    st.text(alphabet=r"ab\d.*+?()[]{}|^$1,9-\w\p\x", max_size=14),
    st.sampled_from([r"(a+)+b", r"(a|a)*$", r"[a-z]{1,900}", r"(x{0,50}){0,50}", r"(?=a)", r"\1"]),
)
LEAVES = st.one_of(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["string", "integer", "number", "boolean", "null", "what"])},
        optional={
            "minimum": NUMBERS,
            "maximum": NUMBERS,
            "multipleOf": NUMBERS,
            "minLength": NUMBERS,
            "maxLength": NUMBERS,
            "pattern": PATTERNS,
            "format": st.sampled_from(["date", "uuid", "email", "nonsense"]),
        },
    ),
    st.fixed_dictionaries({"enum": st.lists(st.text(max_size=5) | NUMBERS, max_size=4)}),
    st.fixed_dictionaries({"const": st.text(max_size=9)}),
    st.fixed_dictionaries(
        {"$ref": st.sampled_from(["#", "#/$defs/a", "#/nowhere", "http://x/y.json", "file:///etc"])}
    ),
    st.booleans(),
    st.integers(),
    st.none(),
)


def _nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.fixed_dictionaries(
            {"type": st.just("object"), "properties": st.dictionaries(NAMES, inner, max_size=4)},
            optional={
                "required": st.lists(NAMES, max_size=3),
                "additionalProperties": inner,
                "patternProperties": st.dictionaries(PATTERNS, inner, max_size=2),
                "$defs": st.dictionaries(NAMES, inner, max_size=2),
                "minProperties": NUMBERS,
            },
        ),
        st.fixed_dictionaries(
            {"type": st.just("array"), "items": inner},
            optional={"minItems": NUMBERS, "maxItems": NUMBERS, "prefixItems": st.lists(inner)},
        ),
        st.fixed_dictionaries({"anyOf": st.lists(inner, max_size=3)}),
        st.fixed_dictionaries({"oneOf": st.lists(inner, max_size=3)}),
        st.fixed_dictionaries({"allOf": st.lists(inner, max_size=3)}),
        st.fixed_dictionaries({"not": inner}),
    )


SCHEMAS = st.recursive(LEAVES, _nested, max_leaves=12)
RULES = st.lists(
    st.sampled_from(
        ["start: a", "a: b a", "b: /x+/", 'c: "(" c ")" | d', "%ignore / /", 'root ::= "a" root?']
    )
    | st.text(alphabet='start:ab"()|/*+?[]{}%<>\n ', max_size=30),
    max_size=6,
).map("\n".join)


def check(kind: GrammarKind, text: str) -> None:
    """Compiled and usable, or refused in words; within the time."""
    spec = GrammarSpec(kind, text)
    began = time.monotonic()
    refusal = None
    try:
        matcher = grammars().matcher(grammars().compile(spec))
        matcher.forced()
    except RequestError as error:
        refusal = error
    assert time.monotonic() - began < SECONDS
    if refusal is not None:
        assert refusal.param == "grammar"
        assert len(str(refusal).splitlines()) == 1


@fuzzed(quick=150, long=20_000, schema=SCHEMAS)
def test_json_schemas(schema: Any) -> None:
    check("json_schema", json.dumps(schema))


@fuzzed(quick=100, long=20_000, text=PATTERNS)
def test_regular_expressions(text: str) -> None:
    check("regex", text)


@fuzzed(quick=100, long=20_000, text=RULES)
def test_grammars(text: str) -> None:
    check("lark", text)


@fuzzed(quick=60, long=5_000, text=st.text(max_size=40) | st.lists(st.text()).map(json.dumps))
def test_choices_and_broken_json(text: str) -> None:
    check("choice", text)
    check("json_schema", text)
