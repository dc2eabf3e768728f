"""Grammars of tool calls, and of calls or a structured answer."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from engine.request import FinishReason, GrammarSpec, Prelude
from server.call_grammar import ForcedCall, ToolCalls, grammar_for_tools, prepared_tools
from server.parsing.hermes import HermesParser
from server.parsing.llama_json import LlamaJsonParser
from tests.engine.helpers import run_all, text_of
from tests.structured.engines import Walk, make_engine, structured, tokenizer
from tests.structured.schemas import SMALL, WORD, closed


def tool(name: str, parameters: dict[str, Any] | None) -> dict[str, Any]:
    function = {"name": name} if parameters is None else {"name": name, "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [
    tool("get_weather", closed(city=WORD, days=SMALL)),
    tool("now", None),
    tool(
        "move",
        {"$defs": {"point": closed(x=SMALL)}, **closed(to={"$ref": "#/$defs/point"})},
    ),
]
HERMES, LLAMA = ToolCalls(TOOLS, "hermes"), ToolCalls(TOOLS, "llama")
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
MOVE = '<tool_call>\n{"name": "move", "arguments": {"to": {"x": 3}}}\n</tool_call>'
LLAMA_MOVE = '{"name": "move", "parameters": {"to": {"x": 3}}}'


def forced_grammar(
    calls: ToolCalls, name: str | None, prelude: Prelude | None = None
) -> GrammarSpec:
    calls = replace(calls, forced=ForcedCall(name))
    return grammar_for_tools(calls, prepared_tools(calls), prelude)


def is_allowed(
    calls: ToolCalls, name: str | None, text: str, prelude: Prelude | None = None
) -> bool:
    walk = Walk(forced_grammar(calls, name, prelude))
    ids = tokenizer().encode_continuation(text)
    assert ids is not None
    return walk.num_allowed([*ids, min(tokenizer().eos_ids)]) == len(ids) + 1


@pytest.mark.parametrize(
    ("calls", "name", "text", "allowed"),
    [
        (HERMES, None, NOW, True),
        (HERMES, None, f"{NOW}\n{MOVE}", True),
        (HERMES, None, "", False),
        (HERMES, None, "Hello", False),
        (HERMES, None, NOW.replace("now", "later"), False),
        (HERMES, None, NOW.replace("{}", '{"x": 1}'), False),
        (HERMES, None, MOVE.replace("3", '"3"'), False),
        (HERMES, "move", MOVE, True),
        (HERMES, "move", NOW, False),
        (HERMES, "move", f"{MOVE}\n{MOVE}", False),
        (replace(HERMES, max_calls=1), None, NOW, True),
        (replace(HERMES, max_calls=1), None, f"{NOW}\n{NOW}", False),
        (HERMES, None, f"{NOW}\n", True),
        (HERMES, None, f"{NOW}\n\n", False),
        (replace(HERMES, max_calls=1), None, f"{NOW}\n", False),
        (LLAMA, None, f"{LLAMA_MOVE}; ", True),
        (replace(HERMES, max_calls=2), None, f"{NOW}\n{NOW}", True),
        (LLAMA, None, LLAMA_MOVE, True),
        (LLAMA, None, f"{LLAMA_MOVE}; {LLAMA_MOVE}", True),
        (LLAMA, "now", LLAMA_MOVE, False),
    ],
)
def test_what_a_tool_choice_allows(
    calls: ToolCalls, name: str | None, text: str, allowed: bool
) -> None:
    assert is_allowed(calls, name, text) == allowed


POINT = {"type": "object", "properties": {"x": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("parameters", "arguments", "allowed"),
    [
        (POINT, '{"x": 1}', True),
        (POINT, '{"x": 1, "type": "integer"}', False),
        ({**POINT, "additionalProperties": True}, '{"x": 1, "y": 2}', True),
        ({**POINT, "allOf": [{"properties": {"y": {"type": "integer"}}}]}, '{"y": 2}', True),
        ({"type": "object"}, '{"x": 1}', True),
        ({"type": "object", "properties": {}}, '{"x": 1}', False),
        ({**POINT, "required": ["x", "y"]}, '{"x": 1, "y": "z"}', True),
        ({}, '{"x": 1}', False),
    ],
)
def test_unlisted_arguments(parameters: dict[str, Any], arguments: str, allowed: bool) -> None:
    calls = ToolCalls([tool("f", parameters)], "hermes")
    text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
    assert is_allowed(calls, None, text) == allowed


def test_calls_may_come_behind_thinking() -> None:
    prelude = Prelude("</think>", start="<think>")
    assert is_allowed(HERMES, None, f"<think>Hm.</think>\n\n{NOW}", prelude)
    assert is_allowed(HERMES, None, NOW, prelude)


@pytest.mark.parametrize("drafting", ["plain", "grammar"])
@pytest.mark.parametrize("calls", [HERMES, LLAMA], ids=["hermes", "llama"])
def test_generated_calls_are_read_back(calls: ToolCalls, drafting: str) -> None:
    grammar = forced_grammar(replace(calls, max_calls=2), "get_weather")
    requests = [structured(grammar, f"c{seed}", seed=seed, temperature=1.0) for seed in range(3)]
    for outputs in run_all(make_engine(drafting), requests).values():
        assert outputs[-1].finish_reason is FinishReason.STOP
        parser = HermesParser() if calls.form == "hermes" else LlamaJsonParser({"get_weather"})
        start, *rest = parser.feed(text_of(outputs)) + parser.finish()
        assert start.name == "get_weather"
        arguments = json.loads("".join(delta.text for delta in rest))
        assert set(arguments) == {"city", "days"}
