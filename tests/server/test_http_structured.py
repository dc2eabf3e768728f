"""Structured-output fields: which grammar the engine is asked for."""

from __future__ import annotations

import json

import pytest

from engine.request import FinishReason, GrammarSpec, Prelude
from tests.server.scripted_engine import Step

SCHEMA = {"type": "object", "properties": {"z": {"type": "integer"}, "a": {"type": "string"}}}
SCHEMA_SPEC = GrammarSpec("json_schema", json.dumps(SCHEMA))
REGEX, LARK = r"\d{2}", 'start: "x"'

FIELDS = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": None, "guided_json": None}, None),
    ({"response_format": {"type": "json_object"}}, GrammarSpec("json_object")),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
            }
        },
        SCHEMA_SPEC,
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "any"}}},
        GrammarSpec("json_schema", "{}"),
    ),
    ({"guided_json": SCHEMA}, SCHEMA_SPEC),
    ({"guided_json": json.dumps(SCHEMA)}, SCHEMA_SPEC),
    ({"guided_json": SCHEMA, "response_format": {"type": "text"}}, SCHEMA_SPEC),
    ({"guided_regex": REGEX}, GrammarSpec("regex", REGEX)),
    ({"guided_choice": ["yes", 'n"o']}, GrammarSpec("choice", json.dumps(["yes", 'n"o']))),
    ({"guided_grammar": LARK}, GrammarSpec("lark", LARK)),
    ({"structured_outputs": {"json": SCHEMA}}, SCHEMA_SPEC),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, SCHEMA_SPEC),
    ({"structured_outputs": {"regex": REGEX}}, GrammarSpec("regex", REGEX)),
    ({"structured_outputs": {"choice": ["a"]}}, GrammarSpec("choice", '["a"]')),
    ({"structured_outputs": {"grammar": LARK}}, GrammarSpec("lark", LARK)),
    (
        {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
        GrammarSpec("json_object"),
    ),
]


@pytest.mark.parametrize(("fields", "grammar"), FIELDS)
@pytest.mark.parametrize("api", ["complete", "chat"])
async def test_fields_become_grammars(client, engine, api, fields, grammar):
    response = await getattr(client, api)(n=2, **fields)
    assert response.status_code == 200, response.text
    assert [request.grammar for request in engine.submitted] == [grammar, grammar]


@pytest.mark.parametrize(
    ("opening", "prelude"),
    [
        ("<assistant>", Prelude("</think>", start="<think>")),
        ("<assistant><think>\n", Prelude("</think>", start=None)),
    ],
)
async def test_a_model_that_thinks_may_do_so_first(client, engine, opening, prelude):
    engine.tokenizer.chat_template.source = "</think>"
    engine.tokenizer.generation_prompt = opening
    response = await client.chat(guided_regex="a+")
    assert response.status_code == 200, response.text
    assert engine.submitted[0].grammar == GrammarSpec("regex", "a+", prelude)
    response = await client.complete(guided_regex="a+")
    assert engine.submitted[1].grammar == GrammarSpec("regex", "a+")


async def test_a_grammar_that_gets_stuck_is_an_error_of_its_request(client, engine):
    stuck = Step("", (), FinishReason.ERROR, error="The grammar allows no further token.")
    engine.script = lambda request: [stuck]
    response = await client.chat(guided_regex="a+")
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "The grammar allows no further token."
    assert response.json()["error"]["code"] == "generation_failed"
