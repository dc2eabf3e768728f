"""Compiling grammars: what is refused, in bounded time, and what the accepted ones accept."""

from __future__ import annotations

import json
import time

import pytest

import engine.sampling.grammar as grammar_module
from engine.request import GrammarSpec, Prelude, RequestError
from engine.sampling.grammar import Grammars
from tests.engine.helpers import byte_tokenizer
from tests.structured.engines import Walk, grammars, json_schema, tokenizer

SECONDS = 5.0
"""No grammar within the size limit may take longer, on a busy machine."""


def accepts(spec: GrammarSpec, text: str, style: str = "byte_level") -> bool:
    """Whether a text and an end token behind it satisfy a grammar."""
    tokens = tokenizer(style)
    ids = tokens.encode_continuation(text)
    assert ids is not None
    return Walk(spec, style).num_allowed([*ids, min(tokens.eos_ids)]) == len(ids) + 1


OBJECT = json_schema(
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
        "required": ["a"],
        "additionalProperties": False,
    }
)
OPENED = Prelude("</think>", start=None)
TREE = GrammarSpec("lark", 'start: tree\ntree: "(" tree* ")" | /[0-9]+/')


STRANGE = ['say "hi"', "two\nlines", "back\\slash", "🦊 fox", "é"]
VERSION = GrammarSpec("lark", 'root ::= "v" num\nnum ::= [0-9]+ ("." num)?')


@pytest.mark.parametrize(
    ("spec", "right", "wrong"),
    [
        (
            GrammarSpec("json_object"),
            ["{}", '{"é": [1, {"x": null}]}'],
            ["[]", "1", "", '{"a"}'],
        ),
        (
            OBJECT,
            ['{"a": 1}', '{"a": -3, "b": "x\\n🦊"}'],
            ['{"b": "x"}', '{"a":1}', '{"a": 1, "c": 2}'],
        ),
        (GrammarSpec("regex", r"\d{3}-[a-c]+"), ["123-abc"], ["123-", "12-a", "123-abcd"]),
        (GrammarSpec("regex", "^yes$|^no$"), ["yes", "no"], ["yesno", ""]),
        (GrammarSpec("regex", "(?i)ok|é+"), ["oK", "éé"], ["k", "e"]),
        (GrammarSpec("choice", json.dumps(STRANGE)), STRANGE, ["say", "two", "🦊", "ee", ""]),
        (TREE, ["12", "(1(23)())"], ["(", "()()", "x"]),
        (VERSION, ["v1.20.3"], ["v", "1"]),
        (
            GrammarSpec("json_object", prelude=OPENED),
            ['hm, {"a"?</think>{}', "</think>\n\n{}"],
            ["{}", "hm</think>x"],
        ),
        (GrammarSpec("regex", "a+", OPENED), ["</think>a", "ab\n</think>aa"], ["a", "<think>a"]),
        (
            GrammarSpec("regex", "a+", Prelude("</think>", start="<think>")),
            ["a", "<think>b</think>a", "<think>\n</think>\n\naa"],
            ["b", "b</think>a", "<think>a"],
        ),
        (GrammarSpec("lark", 'start: "x"', OPENED), ["y</think>x"], ["x", "y</think>"]),
    ],
)
@pytest.mark.parametrize("style", ["byte_level", "sentencepiece"])
def test_accepts_what_it_should(
    spec: GrammarSpec, right: list[str], wrong: list[str], style: str
) -> None:
    assert [text for text in right if not accepts(spec, text, style)] == []
    assert [text for text in wrong if accepts(spec, text, style)] == []


BROKEN = {
    "broken regex": GrammarSpec("regex", "(["),
    "look-ahead": GrammarSpec("regex", "(?=a)b"),
    "back-reference": GrammarSpec("regex", r"(a)\1"),
    "nothing to match": GrammarSpec("regex", r"[^\x00-\U0010FFFF]"),
    "no JSON": GrammarSpec("json_schema", "{"),
    "no object": GrammarSpec("json_schema", "[]"),
    "unknown type": json_schema({"type": "strange"}),
    "bad pattern": json_schema({"type": "string", "pattern": "(["}),
    "keyword that can't be enforced": json_schema({"type": "array", "uniqueItems": True}),
    "reference to itself": json_schema({"$ref": "#"}),
    "circle of references": json_schema(
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    ),
    "reference to nowhere": json_schema({"$ref": "#/$defs/missing"}),
    "reference to another host": json_schema({"$ref": "http://127.0.0.1:9/schema.json"}),
    "nothing can satisfy it": json_schema(
        {"type": "object", "properties": {"x": False}, "required": ["x"]}
    ),
    "no list": GrammarSpec("choice", '"a"'),
    "empty list": GrammarSpec("choice", "[]"),
    "no strings": GrammarSpec("choice", "[1]"),
    "broken Lark": GrammarSpec("lark", "start: ((("),
    "Lark without a start": GrammarSpec("lark", "other: /a/"),
    "unknown rule": GrammarSpec("lark", "start: missing"),
    "broken GBNF": GrammarSpec("lark", "root ::= ((("),
}
DEEP = 3000
HUGE = {
    "deep schema": GrammarSpec("json_schema", '{"items":' * DEEP + "{}" + "}" * DEEP),
    "deep regex": GrammarSpec("regex", "(" * 20_000 + "a" + ")" * 20_000),
    "deep Lark": GrammarSpec("lark", "start: " + "(" * 20_000 + '"a"' + ")" * 20_000),
    "deep GBNF": GrammarSpec("lark", "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000),
    "product of alternatives": json_schema(
        {"allOf": [{"anyOf": [{"required": [f"p{i}_{j}"]} for j in range(12)]} for i in range(9)]}
    ),
    "wide object": json_schema(
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1500)}}
    ),
    "huge enumeration": json_schema({"enum": [f"value number {i}" for i in range(100_000)]}),
}


@pytest.mark.parametrize("name", [*BROKEN, *HUGE])
def test_refuses_what_is_broken_or_huge_soon(name: str) -> None:
    started = time.monotonic()
    with pytest.raises(
        RequestError, match=r"^The output grammar can't be used: .{3,400}\.$"
    ) as info:
        grammars().compile((BROKEN | HUGE)[name])
    assert info.value.param == "grammar"
    assert time.monotonic() - started < SECONDS


CATASTROPHIC = {
    "nested repetition": GrammarSpec("regex", "((a|aa)*){1,500}(b|bb){1,500}c{1,30000}"),
    "backtracking bait": GrammarSpec("regex", "^(([a-z])+.)+[A-Z]([a-z])+$"),
    "exponential automaton": GrammarSpec("regex", "(a|b)*a(a|b){40}c"),
    "counted Unicode classes": GrammarSpec("regex", r"(\w|\p{L}){1,5000}\d(?:[^x]{3,900}y){1,90}"),
    "cubed pattern": json_schema(
        {"type": "string", "pattern": "^((a{1,300}){1,300}){1,300}$", "minLength": 100}
    ),
    "long lists": json_schema(
        {"type": "array", "items": {"type": "array", "minItems": 10**4}, "minItems": 10**9}
    ),
    "long string": json_schema({"type": "string", "minLength": 10**5, "maxLength": 10**9}),
    "ambiguous Lark": GrammarSpec("lark", 'start: e\ne: e e | "a" | '),
}


@pytest.mark.parametrize("name", CATASTROPHIC)
def test_catastrophic_grammars_are_refused_or_harmless(name: str) -> None:
    """Each compilation, and each of many masks along a path, takes a bounded time."""
    tokens = tokenizer()
    started = time.monotonic()
    try:
        walk = Walk(CATASTROPHIC[name])
    except RequestError:
        return
    finally:
        assert time.monotonic() - started < SECONDS
    for step in range(60):
        before = time.monotonic()
        allowed = walk.allowed()
        assert time.monotonic() - before < 0.5
        if not allowed:
            break
        others = [i for i in allowed if i not in tokens.eos_ids]
        walk.commit((others or allowed)[step % len(others or allowed)])


def test_compiled_grammars_are_kept_but_not_without_bound() -> None:
    made = Grammars(tokenizer(), len(tokenizer().token_bytes))
    padding = "x" * 40_000
    specs = [GrammarSpec("choice", json.dumps([f"{padding}{i}"])) for i in range(20)]
    for spec in specs:
        made.compile(spec)
    assert 1 < made.num_compiled < 20
    for index in range(100):
        made.compile(GrammarSpec("regex", f"a{{{index}}}"))
    assert made.num_compiled <= 64


def test_a_grammar_of_more_text_than_is_kept_is_compiled_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar_module, "_MAX_CACHED_BYTES", 8)
    made = Grammars(tokenizer(), len(tokenizer().token_bytes))
    short, long = GrammarSpec("regex", "a{3}"), GrammarSpec("regex", "a{3}b{3}c")
    made.compile(short)
    assert made.compile(long).spec == long
    assert (made.known(short) is not None, made.known(long)) == (True, None)


def test_a_model_without_an_end_token_has_no_structured_output() -> None:
    with pytest.raises(RequestError, match="no end token"):
        Grammars(byte_tokenizer(64), 64).compile(GrammarSpec("json_object"))
