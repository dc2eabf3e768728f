"""Structured-output fields: which grammar the engine is asked for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.request import FinishReason, GrammarSpec, Prelude
from server.apis.shared.prompt.unsupported_fields import UNSUPPORTED_CONSTRAINTS
from server.apis.shared.schema.structured import StructuredFields
from tests.server.scripted_engine import Step

SCHEMA = {"type": "object", "properties": {"z": {"type": "null"}, "a": {"type": "string"}}}
SCHEMA_SPEC = GrammarSpec("json_schema", json.dumps(SCHEMA))
CLOSED_SPEC = GrammarSpec("json_schema", json.dumps({**SCHEMA, "additionalProperties": False}))
REGEX, LARK, GBNF = r"\d{2}", 'start: "x"', 'root ::= "x"'

FIELDS: list[tuple[dict[str, Any], GrammarSpec | None]] = [
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
        CLOSED_SPEC,
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
    (
        {"structured_outputs": {"json": SCHEMA, "disable_additional_properties": True}},
        CLOSED_SPEC,
    ),
    # As llama.cpp, Together and TGI have it.
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, SCHEMA_SPEC),
    ({"response_format": {"type": "json_object", "schema": json.dumps(SCHEMA)}}, SCHEMA_SPEC),
    ({"response_format": {"type": "json_object", "value": SCHEMA}}, SCHEMA_SPEC),
    ({"response_format": {"type": "json", "value": SCHEMA}}, SCHEMA_SPEC),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, SCHEMA_SPEC),
    ({"response_format": {"type": "regex", "pattern": REGEX}}, GrammarSpec("regex", REGEX)),
    ({"response_format": {"type": "regex", "regex": REGEX}}, GrammarSpec("regex", REGEX)),
    ({"response_format": {"type": "regex", "value": REGEX}}, GrammarSpec("regex", REGEX)),
    ({"response_format": {"type": "grammar", "grammar": GBNF}}, GrammarSpec("lark", GBNF)),
    ({"response_format": {"type": "ebnf", "ebnf": GBNF}}, GrammarSpec("lark", GBNF)),
    # llama.cpp's, SGLang's, TGI's and Ollama's fields of the request.
    ({"json_schema": SCHEMA}, SCHEMA_SPEC),
    ({"json_schema": json.dumps(SCHEMA)}, SCHEMA_SPEC),
    ({"grammar": GBNF}, GrammarSpec("lark", GBNF)),
    ({"grammar": {"type": "regex", "value": REGEX}}, GrammarSpec("regex", REGEX)),
    ({"grammar": {"type": "json", "value": SCHEMA}}, SCHEMA_SPEC),
    ({"ebnf": GBNF}, GrammarSpec("lark", GBNF)),
    ({"regex": REGEX}, GrammarSpec("regex", REGEX)),
    ({"format": "json"}, GrammarSpec("json_object")),
    ({"format": SCHEMA}, SCHEMA_SPEC),
    ({"format": None, "grammar": None, "regex": None}, None),
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


BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5},
}
CONSTRAINTS: dict[str, Any] = {
    "allowed_token_ids": [1],
    "bad_words": ["a"],
    "custom_logit_processor": "x",
    "extra_body": {"guided_json": SCHEMA},
    "grammar_lazy": True,
    "grammar_string": GBNF,
    "grammar_triggers": [{"type": "word", "value": "<tool>"}],
    "guided_decoding": {"json": SCHEMA},
    "guided_json_object": True,
    "guided_structural_tag": "{}",
    "guided_whitespace_pattern": " ",
    "nvext": {"guided_json": SCHEMA},
    "regex_pattern": REGEX,
    "stop_regex": "a+",
    "structural_tag": "{}",
}


async def post(client, path, **fields):
    return await client.http.post(path, json={"model": "tiny/model", **BODIES[path], **fields})


@pytest.mark.parametrize("name", [*CONSTRAINTS, *StructuredFields.model_fields])
@pytest.mark.parametrize("path", BODIES)
async def test_no_constraint_is_ignored(client, engine, path, name):
    """It is served or refused by name, on every endpoint."""
    served = next((fields for fields, grammar in FIELDS if grammar and name in fields), None)
    fields = served or {name: CONSTRAINTS[name]}
    response = await post(client, path, **fields)
    if served is not None and path != "/v1/messages":
        assert response.status_code == 200, response.text
        assert engine.submitted[0].grammar is not None
        return
    assert response.status_code == 400
    assert f"'{name}' is not supported" in response.json()["error"]["message"]
    assert engine.submitted == []


def test_all_constraints_are_tried():
    assert set(CONSTRAINTS) == set(UNSUPPORTED_CONSTRAINTS)


@pytest.mark.parametrize("path", BODIES)
async def test_unknown_fields_that_change_no_text_pass(client, engine, path):
    harmless = {"guided_decoding_backend": "xgrammar", "lora_path": None, "cache_prompt": True}
    response = await post(client, path, **harmless, structural_tag=None, bad_words=[])
    assert response.status_code == 200, response.text
    assert engine.submitted[0].grammar is None


REFUSED = [
    ({"response_format": {"type": "structural_tag", "structures": []}}, "response_format"),
    ({"response_format": {"type": "json_object", "grammar": GBNF}}, "response_format.grammar"),
    ({"response_format": {"type": "text", "schema": SCHEMA}}, "response_format.schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "properties": {}},
            }
        },
        "response_format.json_schema.properties",
    ),
    (
        {"response_format": {"type": "json_object", "schema": SCHEMA, "value": SCHEMA}},
        "response_format.value",
    ),
    ({"response_format": {"type": "regex"}}, "response_format"),
    ({"response_format": {"type": "grammar"}}, "response_format"),
    ({"grammar": {"type": "regex", "value": SCHEMA}}, "grammar.value"),
    ({"grammar": {"type": "what", "value": "x"}}, "grammar.type"),
    ({"grammar": GBNF, "json_schema": SCHEMA}, "grammar"),
    ({"regex": REGEX, "ebnf": GBNF}, "regex"),
    ({"format": "xml"}, "format"),
    (
        {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " "}},
        "structured_outputs.whitespace_pattern",
    ),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    ({"json_schema": {"type": "strange"}}, "json_schema"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
async def test_what_is_refused_is_named(client, engine, fields, param):
    response = await client.chat(**fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert f"'{param}'" in error["message"]
    assert engine.submitted == []


UNIQUE = {"type": "object", "properties": {"é/x": {"type": "array", "uniqueItems": True}}}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_header_tells_what_is_not_enforced(client, stream):
    response = await client.chat(guided_json=UNIQUE, stream=stream)
    assert response.status_code == 200
    told = response.headers["X-Schema-Not-Enforced"]
    assert told == "guided_json#/properties/%C3%A9~1x/uniqueItems"
    response = await client.chat(guided_json=SCHEMA, stream=stream)
    assert "X-Schema-Not-Enforced" not in response.headers
    many = {"anyOf": [{"not": {"type": "string"}}] * 60}
    response = await client.chat(guided_json=many, stream=stream)
    told = response.headers["X-Schema-Not-Enforced"]
    assert len(told) <= 1000
    assert told.startswith("guided_json#/anyOf/0/not, guided_json#/anyOf/1/not, ")
    assert told.endswith(", ...")


async def test_a_tools_schema_is_named_with_the_place(client, engine):
    def tool(name, schema):
        function = {"name": name, "parameters": {"type": "object", "properties": schema}}
        return {"type": "function", "function": function}

    tools = [tool("good", {}), tool("bad", {"a": {"items": {"type": "strange"}}})]
    response = await client.chat(tools=tools, tool_choice="required")
    error = response.json()["error"]
    assert error["param"] == "tools.1.function.parameters"
    assert error["message"] == (
        "Invalid value for 'tools.1.function.parameters': tool 'bad': at "
        "'/properties/a/items/type': 'strange' is not one of string, number, integer, boolean, "
        "object, array, null."
    )
    assert (await client.chat(tools=tools)).status_code == 200


async def test_what_the_compiler_refuses_is_looked_for(client, engine):
    """The stand-in for the compiler refuses every grammar with the word in it."""
    inner = {"type": "object", "properties": {"a": {}, "b": {"enum": ["broken"]}}}
    schema = {"$defs": {"x": {"type": "array", "items": inner}}, "$ref": "#/$defs/x"}
    response = await client.chat(guided_json=schema)
    error = response.json()["error"]
    assert error["param"] == "guided_json"
    assert "at '/$defs/x/items/properties/b': " in error["message"]
    good = {"type": "function", "function": {"name": "good", "parameters": {}}}
    bad = {"type": "function", "function": {"name": "bad", "parameters": inner}}
    response = await client.chat(tools=[good, bad], tool_choice="required")
    error = response.json()["error"]
    assert error["param"] == "tools.1.function.parameters"
    assert "tool 'bad': at '/properties/b': " in error["message"]
