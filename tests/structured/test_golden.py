"""Promise 1 under grammars: the same structured output, whatever speculates."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from engine.core import EngineCore
from engine.request import FinishReason, GenerationRequest, GrammarSpec, Prelude, RequestOutput
from tests.engine.helpers import run_all, text_of, tokens_of
from tests.structured.engines import (
    DRAFTINGS,
    alone,
    json_schema,
    make_engine,
    structured,
    tokenizer,
)
from tests.structured.schemas import SCHEMAS
from tests.tiers import slow_unless_auto

SAMPLED = {"temperature": 0.9, "top_p": 0.95}
PENALISED = {"repetition_penalty": 1.1, "presence_penalty": 0.4, "frequency_penalty": 0.2}
PREDICTION = '{"user": {"id": 12, "tags": ["the cat", "a map"]}}'


def requests_for(params: dict[str, Any]) -> list[GenerationRequest]:
    """Requests of every kind, two of them without a grammar."""
    schema = {name: json_schema(SCHEMAS[name]) for name in SCHEMAS}
    asked: list[tuple[GrammarSpec | None, dict[str, Any]]] = [
        (schema["flat"], {}),
        (schema["nested"], {"prediction": PREDICTION, "logprobs": 3}),
        (None, {"max_tokens": 60}),
        (schema["long keys"], PENALISED),
        (schema["array of objects"], {"logit_bias": {11: 3.0, 14: -4.0}, "min_tokens": 50}),
        (GrammarSpec("regex", r"[a-f]{3,9}(-\d{2}){2,5}"), {"min_tokens": 20}),
        (GrammarSpec("choice", json.dumps(["the cat eats", "the cat", "a map"])), {}),
        (GrammarSpec("lark", 'start: "(" e ")"\ne: /[a-z]{1,4}/ | e "+" e'), {"max_tokens": 40}),
        (schema["formats"], {"min_p": 0.02, "stop": ("-4", "99")}),
        (None, {"max_tokens": 50, "logprobs": 2, **PENALISED}),
        (GrammarSpec("json_object"), {"max_tokens": 45}),
        (GrammarSpec("regex", "[xyz]{1,5}", Prelude(" a", start=None)), {"max_tokens": 80}),
    ]
    return [
        structured(grammar, f"r{index}", seed=index, **(params | extra))
        for index, (grammar, extra) in enumerate(asked)
    ]


Answer = tuple[list[int], str, list[Any], tuple[Any, Any]]


def answer(outputs: Sequence[RequestOutput]) -> Answer:
    logprobs = [entry for output in outputs for entry in output.logprobs]
    return (
        tokens_of(outputs),
        text_of(outputs),
        [(e.token_id, e.logprob, e.top) for e in logprobs],
        (outputs[-1].finish_reason, outputs[-1].stop_reason),
    )


def answers(core: EngineCore, requests: Sequence[GenerationRequest]) -> dict[str, Answer]:
    return {name: answer(outputs) for name, outputs in run_all(core, requests).items()}


@functools.cache
def plain(sampled: bool) -> dict[str, Answer]:
    requests = requests_for(SAMPLED if sampled else {})
    return {request.request_id: answer(alone(request)) for request in requests}


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafting", slow_unless_auto(["plain", *DRAFTINGS]))
def test_same_output_alone_and_together(drafting: str, sampled: bool) -> None:
    requests = requests_for(SAMPLED if sampled else {})
    core = make_engine(drafting)
    assert answers(core, requests) == plain(sampled)
    figures = core.metrics.drafters
    assert not any(figure.failures for figure in figures.values())
    if drafting not in ("plain", "universal"):  # the mock draft has another language's tastes
        assert sum(figure.accepted_tokens for figure in figures.values()) > 0
    assert drafting == "plain" or sum(figure.draft_tokens for figure in figures.values()) > 0
    if "grammar" in figures:
        assert figures["grammar"].draft_tokens > 50
        assert figures["grammar"].accepted_tokens == figures["grammar"].draft_tokens


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafting", ["plain", "grammar", "fixed"])
def test_same_output_after_preemption_and_from_the_prefix_cache(
    drafting: str, sampled: bool
) -> None:
    requests = requests_for(SAMPLED if sampled else {})
    starved = make_engine(drafting, num_blocks=45)
    assert answers(starved, requests) == plain(sampled)
    assert starved.metrics.preemptions > 0
    core = make_engine(drafting)
    answers(core, requests)
    hits = core.metrics.prefix_hits
    assert answers(core, requests) == plain(sampled)
    assert core.metrics.prefix_hits > hits


def test_grammars_leave_other_requests_alone() -> None:
    requests = requests_for(SAMPLED)
    free = [request for request in requests if request.grammar is None]
    together = answers(make_engine("fixed"), requests)
    assert {r.request_id: together[r.request_id] for r in free} == answers(make_engine(), free)


@pytest.mark.parametrize("drafting", ["plain", "fixed"])
def test_lossy_acceptance_stays_inside_the_grammar(drafting: str) -> None:
    core = make_engine(drafting)
    schema = SCHEMAS["long keys"]
    requests = []
    for index in range(6):
        request = structured(json_schema(schema), f"lossy{index}", seed=index, **SAMPLED)
        lossy = replace(request.speculation, accept_top_k=200)
        requests.append(replace(request, speculation=lossy))
    for outputs in run_all(core, requests).values():
        assert outputs[-1].finish_reason is FinishReason.STOP
        assert set(json.loads(text_of(outputs))) == set(schema["properties"])


@pytest.mark.parametrize("drafting", ["plain", "fixed"])
def test_logprobs_are_those_of_the_model_without_the_grammar(drafting: str) -> None:
    request = structured(GrammarSpec("choice", '["the cat"]'), logprobs=1)
    constrained = alone(request, drafting=drafting)
    free = alone(replace(request, grammar=None, request_id="free"))
    first, unrestrained = constrained[0].logprobs[0], free[0].logprobs[0]
    assert first.top == unrestrained.top
    assert first.token_id != unrestrained.token_id
    assert first.logprob < unrestrained.logprob


@pytest.mark.parametrize("drafting", ["plain", "grammar", "fixed"])
def test_each_of_n_choices_satisfies_the_grammar(drafting: str) -> None:
    request = structured(json_schema(SCHEMAS["flat"]), **SAMPLED)
    choices = [
        replace(request, request_id=f"choice{index}", params=request.params.for_choice(index))
        for index in range(4)
    ]
    outputs = run_all(make_engine(drafting), choices)
    texts = [text_of(outputs[choice.request_id]) for choice in choices]
    assert len(set(texts)) > 1
    assert all(set(json.loads(text)) == {"name", "age", "active"} for text in texts)
    expected = [text_of(alone(choice)) for choice in choices]
    assert texts == expected


def test_forced_tokens_save_target_passes() -> None:
    request = structured(json_schema(SCHEMAS["long keys"]))
    plain_core, core = make_engine(), make_engine("grammar", draft_length=16)
    assert answers(plain_core, [request]) == answers(core, [request])
    assert core.metrics.target_passes < 0.5 * plain_core.metrics.target_passes
    assert len(tokens_of(alone(request))) > len(tokenizer().encode("shipping_address"))
