"""Grammars of tool calls, and of calls or a structured answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.config import LimitsConfig
from engine.request import FinishReason, GrammarSpec, Prelude
from engine.sampling.grammar import Grammars
from engine.sampling.grammar_mask import num_mask_words
from engine.scheduling.sequence import TokenSequence
from engine.text.tokenizer import TextTokenizer
from server.apis.shared.grammar.tool_calls import (
    ForcedCall,
    TagTokens,
    ToolCalls,
    grammar_for_tools,
    prepared_tools,
)
from server.parsing.hermes import HermesParser
from server.parsing.llama_json import LlamaJsonParser
from tests.engine.helpers import make_request, run_all, text_of
from tests.structured.engines import Walk, allowed_in, make_engine, structured, tokenizer
from tests.structured.schemas import SMALL, WORD, closed
from tests.tiny_models import make_tokenizer


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
    return grammar_for_tools(calls, prepared_tools(calls, LimitsConfig()), prelude)


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


def vocabulary_with(*added: str) -> TextTokenizer:
    fast = make_tokenizer("byte_level", 400)
    fast.add_tokens(list(added))
    return TextTokenizer(fast)


def allowed_behind(tokens: TextTokenizer, calls: ToolCalls, ids: Sequence[int]) -> set[int]:
    """Tokens that the grammar of forced calls allows behind some."""
    made = Grammars(tokens, len(tokens.token_bytes))
    matcher = made.matcher(made.compile(forced_grammar(calls, None)))
    sequence = TokenSequence(make_request([0]), 0.0)
    sequence.token_ids.extend(ids)
    matcher.catch_up(sequence)
    masks = np.empty((1, num_mask_words(made.vocab_size)), np.int32)
    assert matcher.check(sequence, [], masks).num_rows == 1
    return set(allowed_in(masks[0]))


def test_tags_that_are_tokens_come_as_those() -> None:
    """Behind a call nothing but that token leads to another one."""
    tokens = vocabulary_with("<tool_call>", "</tool_call>")
    tags = TagTokens.find(tokens)
    assert tags is not None
    calls = replace(HERMES, tags=tags)
    assert allowed_behind(tokens, calls, []) == {tags.opening}
    inside = tokens.encode_continuation('\n{"name": "now", "arguments": {}}\n')
    assert inside is not None
    call = [tags.opening, *inside, tags.closing]
    line = tokens.token_bytes.index(b"\n")
    assert allowed_behind(tokens, calls, call) == {line, *tokens.eos_ids}
    assert allowed_behind(tokens, calls, [*call, line]) == {tags.opening, *tokens.eos_ids}
    assert allowed_behind(tokens, calls, [*call, line, *call]) == {line, *tokens.eos_ids}


def test_a_token_that_ends_a_tag_and_its_line_is_no_step_towards_another_call() -> None:
    tokens = vocabulary_with(">\n")
    assert TagTokens.find(tokens) is None
    both = len(tokens.token_bytes) - 1
    assert tokens.token_bytes[both] == b">\n"
    call = tokens.encode_continuation(NOW.removesuffix(">"))
    assert call is not None
    assert both in allowed_behind(tokens, HERMES, call)
    assert tokens.eos_ids <= allowed_behind(tokens, HERMES, [*call, both])


def test_tags_that_are_control_tokens_are_spelled() -> None:
    fast = make_tokenizer("byte_level", 400)
    fast.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>"]})
    assert TagTokens.find(TextTokenizer(fast)) is None


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
