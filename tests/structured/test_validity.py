"""Outputs satisfy their grammar, whole, and end where it is complete."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from llguidance import LLParserLimits

from engine.request import FinishReason, GrammarSpec, RequestError
from tests.engine.helpers import run_all, text_of, tokens_of
from tests.structured.engines import (
    BabblingRunner,
    alone,
    grammars,
    json_schema,
    make_engine,
    structured,
    tokenizer,
)
from tests.structured.schemas import SCHEMAS


@pytest.mark.parametrize("style", ["byte_level", "sentencepiece"])
@pytest.mark.parametrize("drafting", ["plain", "fixed"])
@pytest.mark.parametrize("name", SCHEMAS)
def test_json_satisfies_its_schema(name: str, drafting: str, style: Any) -> None:
    """Also when the model loves the logits' padding columns best."""
    validator = jsonschema.Draft202012Validator(
        SCHEMAS[name], format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    requests = [
        structured(json_schema(SCHEMAS[name]), style=style, seed=seed, temperature=seed / 4)
        for seed in range(4)
    ]
    core = make_engine(drafting, style=style, runner=BabblingRunner(style, num_blocks=512))
    for outputs in run_all(core, requests).values():
        assert outputs[-1].finish_reason is FinishReason.STOP
        assert outputs[-1].stop_reason is None
        assert tokens_of(outputs)[-1] in tokenizer(style).eos_ids
        validator.validate(json.loads(text_of(outputs)))


@pytest.mark.parametrize("drafting", ["plain", "grammar", "fixed"])
def test_other_kinds_match(drafting: str) -> None:
    pattern = r"([A-Z][a-z]{1,6} ){2}#\d{1,3}"
    choices = ["the cat", "the catalogue", "🦊🚀"]
    requests = [
        structured(GrammarSpec("regex", pattern), "regex", seed=1, temperature=1.0),
        structured(GrammarSpec("choice", json.dumps(choices)), "choice", seed=2, temperature=1.0),
        structured(GrammarSpec("lark", 'start: "<" /[a-z]{2,5}/ ">"'), "lark", seed=3),
        structured(GrammarSpec("lark", 'root ::= "v" [0-9] "." [0-9]'), "gbnf", seed=4),
    ]
    outputs = run_all(make_engine(drafting), requests)
    assert all(out[-1].finish_reason is FinishReason.STOP for out in outputs.values())
    texts = {name: text_of(out) for name, out in outputs.items()}
    assert re.fullmatch(pattern, texts["regex"])
    assert texts["choice"] in choices
    assert re.fullmatch("<[a-z]{2,5}>", texts["lark"])
    assert re.fullmatch(r"v\d\.\d", texts["gbnf"])


@pytest.mark.parametrize("drafting", ["plain", "grammar", "fixed"])
@pytest.mark.parametrize("max_tokens", [1, 7, 20])
def test_max_tokens_cuts_with_reason_length(drafting: str, max_tokens: int) -> None:
    whole = structured(json_schema(SCHEMAS["long keys"]))
    cut = replace(whole, params=replace(whole.params, max_tokens=max_tokens))
    outputs = alone(cut, drafting=drafting)
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert tokens_of(outputs) == tokens_of(alone(whole))[:max_tokens]


@pytest.mark.parametrize("drafting", ["plain", "grammar", "fixed"])
def test_a_stop_string_in_forced_text_ends_there(drafting: str) -> None:
    request = structured(json_schema(SCHEMAS["long keys"]), stop=("_address",))
    outputs = alone(request, drafting=drafting)
    assert text_of(outputs) == '{"shipping'
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert outputs[-1].stop_reason == "_address"
    assert outputs[-1].usage.completion_tokens == len(tokens_of(outputs))


@pytest.mark.parametrize("drafting", ["plain", "grammar", "fixed"])
def test_min_tokens_holds_until_the_grammar_leaves_only_the_end(drafting: str) -> None:
    regex = structured(GrammarSpec("regex", "[ab]{1,12}"), min_tokens=9)
    assert len(tokens_of(alone(regex, drafting=drafting))) > 9
    choice = structured(GrammarSpec("choice", '["ab"]'), min_tokens=50)
    outputs = alone(choice, drafting=drafting)
    assert text_of(outputs) == "ab"
    assert outputs[-1].finish_reason is FinishReason.STOP


@pytest.mark.parametrize("drafting", ["plain", "grammar", "fixed"])
def test_stop_tokens_and_bias_against_all_that_is_allowed_do_not_leave_the_grammar(
    drafting: str,
) -> None:
    ids = set(tokenizer().encode("abc"))
    request = structured(
        GrammarSpec("choice", '["abc"]'),
        min_tokens=20,
        stop_token_ids=frozenset(ids),
        logit_bias=dict.fromkeys(ids, -100.0),
    )
    outputs = alone(request, drafting=drafting)
    assert "abc".startswith(text_of(outputs))
    assert outputs[-1].finish_reason is FinishReason.STOP


@pytest.mark.parametrize("drafting", ["plain", "grammar", "fixed"])
def test_a_dead_end_fails_its_request_alone(drafting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The grammar is one that the library can't follow far."""
    limits = LLParserLimits(step_lexer_fuel=400, verbose_errors=False)
    monkeypatch.setattr("engine.sampling.grammar_compiler._limits", lambda: limits)
    grammars.cache_clear()
    other = structured(GrammarSpec("regex", "(the|a) cat"), "other", temperature=0.7)
    hard = GrammarSpec("regex", r"x[a-z]+|y(\w|\p{L}){1,500}\d(?:[^x]{3,90}y){1,9}")
    to_the_hard_part = dict.fromkeys(tokenizer().encode("y"), 99.0)
    stuck = structured(hard, "stuck", logit_bias=to_the_hard_part)
    core = make_engine(drafting)
    outputs = run_all(core, [stuck, other])
    failed = outputs["stuck"][-1]
    assert failed.finish_reason is FinishReason.ERROR
    assert failed.error is not None
    assert failed.error.startswith("The grammar allows no further token")
    assert text_of(outputs["stuck"]).startswith("y")
    assert tokens_of(outputs["stuck"]) == tokens_of(alone(stuck))
    assert outputs["other"][-1].finish_reason is FinishReason.STOP
    assert text_of(outputs["other"]) == text_of(alone(other))
    assert core.metrics.finished[FinishReason.ERROR] == 1
    assert core.grammars.of("stuck") is None


def test_ignore_eos_and_a_grammar_exclude_each_other() -> None:
    request = structured(GrammarSpec("json_object"), ignore_eos=True)
    with pytest.raises(RequestError) as info:
        make_engine().limits.check(request)
    assert info.value.param == "ignore_eos"
