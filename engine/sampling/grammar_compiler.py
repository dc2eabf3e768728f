"""Compiles one grammar, in this process or in one that can be ended. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, assert_never

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from engine.request import GrammarSpec, Prelude
from engine.sampling.refusal import refusal
from engine.sampling.schema_cost import embedded_schemas, why_too_costly

_NUM_TRIAL_TOKENS = 8
_NO_FORCING = '%llguidance {"no_forcing": true}\n'
"""The library reads ahead while only one byte can follow: in ``/x+/ /x+/``, which never ends as the
first takes everything, for ever, in a thread that nothing can stop. Of statements the last counts.
"""
_ANSWER = "answer"
"""Name of the wanted grammar inside one that lets other text come first."""


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar that is ready for any number of requests."""

    spec: GrammarSpec
    start: LLMatcher
    """At the beginning; it is copied, not moved."""


def compile_grammar(
    spec: GrammarSpec, vocabulary: LLTokenizer, end_ids: frozenset[int]
) -> CompiledGrammar:
    """Compile a grammar and follow it for a few tokens.

    Args:
        end_ids: tokens that end an output.

    Raises:
        RequestError: it is malformed, unsatisfiable, too large, or of a kind of its language
            that can't be enforced.
    """
    start = start_of(spec, vocabulary)
    error = start.get_error() or _error_ahead(start, end_ids)
    if error:
        message = readable(error)
        raise refusal("no output satisfies it" if "NoExtension" in message else message)
    return CompiledGrammar(spec, start)


def start_of(spec: GrammarSpec, vocabulary: LLTokenizer) -> LLMatcher:
    """A matcher at the beginning of a grammar, which may be in error already.

    Raises:
        RequestError: the text is none of its kind, or would take all memory.
    """
    grammar = _llguidance_grammar(spec)
    if (reason := _reason_to_refuse(spec)) is not None:
        raise refusal(reason)
    start = LLMatcher(vocabulary, grammar, log_level=0, limits=_limits())
    if not start.is_error():
        # The first mask builds most of the lexer, which every copy then shares.
        start.compute_bitmask()
    return start


def readable(message: str, limit: int = 300) -> str:
    """The one line of an llguidance message that is meant for people."""
    lines = [line.strip() for line in message.strip().splitlines()] or [""]
    cause = next((line for line in lines if line.startswith("error:")), lines[0])
    cause = cause.removeprefix("error:").strip().rstrip(".:")
    return cause if len(cause) <= limit else cause[:limit] + "..."


def _limits() -> LLParserLimits:
    """What one grammar may cost: some 20 ms of lexer building at the start, 10 ms a mask."""
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=150_000,
        step_max_items=50_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def _error_ahead(start: LLMatcher, end_ids: frozenset[int]) -> str:
    """Follow a few tokens: a grammar that is too complex mostly shows it at once."""
    matcher = start.deep_copy()
    for _ in range(_NUM_TRIAL_TOKENS):
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        token_id = next((int(i) for i in allowed if i not in end_ids), None)
        if matcher.is_error() or token_id is None:
            break
        matcher.consume_token(token_id)
    return matcher.get_error()


def _reason_to_refuse(spec: GrammarSpec) -> str | None:
    """What would take all memory, found before the library begins."""
    if spec.kind == "json_schema":
        return why_too_costly(json.loads(spec.text))
    if spec.kind in ("lark", "rules"):
        return why_too_costly(embedded_schemas(spec.text))
    return None


def _llguidance_grammar(spec: GrammarSpec) -> str:
    grammar = _to_llguidance(spec)
    if spec.prelude is None:
        return grammar
    if not grammar.startswith("{"):
        grammar = json.dumps({"grammars": [{"lark_grammar": grammar}]})
    first, *others = json.loads(grammar)["grammars"]
    head = _behind(spec.prelude) + (_NO_FORCING if spec.kind == "lark" else "")
    parts = [{"lark_grammar": head}, {**first, "name": _ANSWER}, *others]
    return json.dumps({"grammars": parts})


def _behind(prelude: Prelude) -> str:
    """A grammar of free text up to its end tag, some white space, and the answer."""
    rest = f"free /[ \\n]{{0,4}}/ @{_ANSWER}"
    if prelude.start is not None:
        rest = f"@{_ANSWER} | {json.dumps(prelude.start)} {rest}"
    return f"start: {rest}\nfree[suffix={json.dumps(prelude.end)}]: /(?s:.*)/\n"


def _to_llguidance(spec: GrammarSpec) -> str:
    try:
        match spec.kind:
            case "json_object":
                return _from_json_schema({"type": "object"})
            case "json_schema":
                return _from_json_schema(json.loads(spec.text))
            case "regex":
                return LLMatcher.grammar_from_regex(spec.text)
            case "choice":
                return LLMatcher.grammar_from_lark(_one_of(json.loads(spec.text)))
            case "lark":
                lark = any_to_lark(spec.text) if "::=" in spec.text else spec.text
                return LLMatcher.grammar_from_lark(f"{lark}\n{_NO_FORCING}")
            case "rules":
                return LLMatcher.grammar_from_lark(spec.text)
    except (ValueError, RecursionError, GbnfToLarkError) as error:
        raise refusal(readable(str(error))) from error
    assert_never(spec.kind)


def _from_json_schema(schema: Any) -> str:
    if not isinstance(schema, dict):
        raise ValueError("a JSON schema must be an object")
    # One line, spaced as `json.dumps` does it: free white space lets a weak model fill its output
    # with blank lines, and leaves hardly a token forced.
    return LLMatcher.grammar_from_json_schema(
        json.dumps(schema),
        defaults={
            "whitespace_flexible": False,
            "item_separator": ", ",
            "key_separator": ": ",
        },
    )


def _one_of(choices: Any) -> str:
    is_list = isinstance(choices, list) and choices
    if not is_list or not all(isinstance(choice, str) for choice in choices):
        raise ValueError("the choices must be a list of at least one string")
    return "start: " + " | ".join(json.dumps(choice) for choice in choices)
