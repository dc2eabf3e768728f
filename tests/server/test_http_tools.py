"""Tools, reasoning and template options of /v1/chat/completions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.config import LimitsConfig
from engine.request import ChatOptions, FinishReason
from server.apis.shared.grammar.tool_calls import (
    ForcedCall,
    ToolCalls,
    grammar_for_tools,
    prepared_tools,
)
from tests.server.scripted_engine import Step, words

HI = {"role": "user", "content": "Hi"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a <eos> city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = [
    "<tool",
    '_call>\n{"name": "wea',
    'ther", "arguments": {"ci',
    'ty": "Rome"}}\n</tool_',
    "call>",
]


async def test_whole_response(client, engine):
    engine.script = lambda request: words(*CALL)
    body = (await client.chat(tools=[WEATHER])).json()
    choice = body["choices"][0]
    (call,) = choice["message"].pop("tool_calls")
    assert choice["message"] == {"role": "assistant", "content": None, "refusal": None}
    assert call.pop("id").startswith("call_")
    assert call == {
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
    }
    assert choice["finish_reason"] == "tool_calls"
    assert engine.submitted[0].source.options == ChatOptions(tools=(WEATHER,))


@pytest.mark.parametrize("n", [1, 2])
async def test_stream_says_the_same_as_the_whole_response(client, engine, n):
    script = ["So: ", *CALL, "\n", *CALL, " \n"]
    engine.script = lambda request: words(*script)
    fields = {"tools": [WEATHER], "n": n, "logprobs": True, "return_token_ids": True}
    whole = (await client.chat(**fields)).json()
    events = await client.chat_stream(**fields)
    assert whole["prompt_token_ids"] == list(engine.submitted[0].prompt_token_ids)
    assert events[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    for choice in whole["choices"]:
        chunks = [c for e in events for c in e["choices"] if c["index"] == choice["index"]]
        assert chunks[0]["delta"] == {"role": "assistant", "content": None, "refusal": None}
        deltas = [chunk["delta"] for chunk in chunks[1:]]
        assert choice["message"]["content"] == "So:"
        assert "".join(delta.get("content", "") for delta in deltas) == "So:"
        parts = [call for delta in deltas for call in delta.get("tool_calls", ())]
        for index, call in enumerate(choice["message"]["tool_calls"]):
            first, *rest = [part for part in parts if part["index"] == index]
            assert first["id"].startswith("call_")
            assert (first["type"], first["function"]["name"]) == ("function", "weather")
            assert all(set(part) == {"index", "function"} for part in rest)
            text = first["function"]["arguments"] + "".join(
                p["function"]["arguments"] for p in rest
            )
            assert text == call["function"]["arguments"] == '{"city": "Rome"}'
            assert len(rest) > 1
        assert len(choice["message"]["tool_calls"]) == 2
        assert [c["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + ["tool_calls"]
        entries = [e for c in chunks if c["logprobs"] for e in c["logprobs"]["content"]]
        assert entries == choice["logprobs"]["content"]
        assert len(entries) == len(script)
        assert [i for c in chunks for i in c.get("token_ids", ())] == choice["token_ids"]
        assert choice["token_ids"] == list(range(len(script)))


async def test_length_is_not_hidden_by_a_call(client, engine):
    engine.script = lambda request: words(*CALL[:4], finish=FinishReason.LENGTH)
    choice = (await client.chat(tools=[WEATHER])).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Rome"}'
    last = (await client.chat_stream(tools=[WEATHER]))[-1]["choices"][0]
    assert last["finish_reason"] == "length"


async def test_text_answer_with_tools_at_hand(client, engine):
    choice = (await client.chat(tools=[WEATHER])).json()["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Hello world!", "refusal": None}
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("fields", [{}, {"tools": []}, {"tools": [WEATHER], "tool_choice": "none"}])
async def test_without_tools_markup_is_text(client, engine, fields):
    engine.script = lambda request: words(*CALL)
    choice = (await client.chat(**fields)).json()["choices"][0]
    assert choice["message"]["content"] == "".join(CALL)
    assert choice["finish_reason"] == "stop"
    assert engine.submitted[0].source.options.tools == ()


async def test_one_call_at_most(client, engine):
    engine.script = lambda request: words(*CALL, *CALL)
    fields = {"tools": [WEATHER], "parallel_tool_calls": False}
    message = (await client.chat(**fields)).json()["choices"][0]["message"]
    assert len(message["tool_calls"]) == 1


async def test_llama_form(client, engine):
    engine.tokenizer.chat_template.source = "{{ tools }} <|python_tag|>"
    engine.script = lambda request: words('{"name": "weather", ', '"parameters": {"city": "Rome"}}')
    choice = (await client.chat(tools=[WEATHER])).json()["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Rome"}'
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("source", ["{{ messages }}", "{{ tools }}", "{{ tools }} [TOOL_CALLS]"])
async def test_models_without_tools_refuse_them(client, engine, source):
    engine.tokenizer.chat_template.source = source
    response = await client.chat(tools=[WEATHER])
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools"
    assert response.json()["error"]["code"] == "unsupported_parameter"
    assert (await client.chat()).status_code == 200


NOW = {"type": "function", "function": {"name": "now"}}
FORCED = [
    ("required", ForcedCall(), None),
    ({"type": "function", "function": {"name": "now"}}, ForcedCall("now"), None),
    ("required", ForcedCall(), 1),
]


@pytest.mark.parametrize(("choice", "forced", "max_calls"), FORCED)
async def test_forced_calls_are_a_grammar(client, engine, choice, forced, max_calls):
    fields: dict[str, Any] = {"response_format": {"type": "json_object"}}
    if max_calls:
        fields["parallel_tool_calls"] = False
    response = await client.chat(tools=[WEATHER, NOW], tool_choice=choice, **fields)
    assert response.status_code == 200, response.text
    calls = ToolCalls((WEATHER, NOW), "hermes", max_calls, forced)
    (request,) = engine.submitted
    assert request.grammar == grammar_for_tools(calls, prepared_tools(calls, LimitsConfig()))
    assert len(request.source.options.tools) == 2


async def test_all_apis_force_calls(client, engine):
    tool = {"name": "now", "input_schema": {"type": "object", "properties": {}}}
    chat = {"model": "tiny/model", "messages": [HI], "max_tokens": 9}
    requests = {
        "/v1/messages": {**chat, "tools": [tool], "tool_choice": {"type": "any"}},
        "/v1/responses": {
            "model": "tiny/model",
            "input": "Hi",
            "tools": [{"type": "function", "name": "now"}],
            "tool_choice": {"type": "function", "name": "now"},
        },
    }
    for path, body in requests.items():
        response = await client.http.post(path, json=body)
        assert response.status_code == 200, response.text
    every, one = (request.grammar.text for request in engine.submitted)
    assert every.startswith("start: calls\ncalls: call (separator call)* separator?\n")
    assert one.startswith("start: calls\ncalls: call\n")


async def test_schema_with_a_bad_pattern_harms_nobody(client):
    bad = {"type": "object", "properties": {"x": {"type": "string", "pattern": "(((((a*)*)*)*"}}}
    function = {"name": "f", "parameters": bad}
    assert (
        await client.chat(tools=[{"type": "function", "function": function}])
    ).status_code == 200


async def test_messages_of_a_conversation_with_tools(client, engine):
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Zoë"}'},
    }
    messages = [
        HI,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Hm."},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "Sun"}]},
    ]
    assert (await client.chat(messages=messages, tools=[WEATHER])).status_code == 200
    parsed = {**call, "function": {"name": "weather", "arguments": {"city": "Zoë"}}}
    assert engine.submitted[0].source.messages == (
        HI,
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Hm.",
            "tool_calls": [parsed],
        },
        {"role": "tool", "content": "Sun", "tool_call_id": "call_1"},
    )
    without_content = [HI, {"role": "assistant", "tool_calls": [call]}, messages[2]]
    assert (await client.chat(messages=without_content)).status_code == 200


@pytest.mark.parametrize("opened", [False, True])
async def test_reasoning(client, engine, opened):
    engine.tokenizer.chat_template.source = "</think>"
    engine.tokenizer.generation_prompt = "<assistant><think>\n" if opened else "<assistant>"
    script = ["<think>"] * (not opened) + ["Hm", ". ", "</th", "ink>", "\n\nYes", "."]
    engine.script = lambda request: words(*script)
    whole = (await client.chat()).json()
    message = whole["choices"][0]["message"]
    assert message["reasoning_content"] == "Hm."
    assert message["content"] == "Yes."
    deltas = [c["delta"] for e in await client.chat_stream() for c in e["choices"]]
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "Hm."
    assert "".join(d.get("content", "") for d in deltas) == "Yes."
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


async def test_model_that_does_not_think_keeps_its_tags(client, engine):
    engine.script = lambda request: words("<think>", "Hm", "</think>", "Yes")
    message = (await client.chat()).json()["choices"][0]["message"]
    assert message["content"] == "<think>Hm</think>Yes"
    assert "reasoning_content" not in message


async def test_thinking_cut_short(client, engine):
    engine.tokenizer.chat_template.source = "</think>"
    engine.script = lambda request: words("<think>", "Hm", finish=FinishReason.LENGTH)
    choice = (await client.chat()).json()["choices"][0]
    assert choice["message"]["reasoning_content"] == "Hm"
    assert choice["message"]["content"] == ""
    assert choice["finish_reason"] == "length"


async def test_template_options(client, engine):
    await client.chat(chat_template_kwargs={"enable_thinking": False})
    assert engine.submitted[-1].source.options.template_args == {"enable_thinking": False}
    await client.chat(add_generation_prompt=False)
    assert engine.submitted[-1].source.options == ChatOptions(add_generation_prompt=False)
    messages = [HI, {"role": "assistant", "content": "Sure, "}]
    response = await client.chat(messages=messages, continue_final_message=True)
    assert response.status_code == 200
    assert engine.submitted[-1].source.options == ChatOptions(
        add_generation_prompt=False, continue_final_message=True
    )


async def test_held_back_text_of_a_stream_is_not_lost(client, engine):
    engine.script = lambda request: [
        Step("Hi <tool", (b"x",)),
        Step("", (b"y",), FinishReason.STOP),
    ]
    events = await client.chat_stream(tools=[WEATHER])
    text = "".join(e["choices"][0]["delta"].get("content") or "" for e in events)
    assert text == "Hi <tool"


@pytest.mark.parametrize(
    "script",
    [
        ["```", "json\n{", '"name": "wea', 'ther", "arguments": {"city"', ': "Rome"}}\n', "```"],
        ['{{"name": "weather", "arguments": ', '{"city": "Rome"}', "}}"],
    ],
)
async def test_an_answer_that_is_a_block_of_json_is_a_call(client, engine, script):
    engine.script = lambda request: words(*script)
    choice = (await client.chat(tools=[WEATHER])).json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls"
    chunks = [c for e in await client.chat_stream(tools=[WEATHER]) for c in e["choices"]]
    parts = [call for c in chunks for call in c["delta"].get("tool_calls", ())]
    assert parts[0]["function"]["name"] == "weather"
    assert "".join(part["function"]["arguments"] for part in parts) == '{"city": "Rome"}'
    assert not any(c["delta"].get("content") for c in chunks)
    assert chunks[-1]["finish_reason"] == "tool_calls"
    text = (await client.chat()).json()["choices"][0]["message"]
    assert text["content"] == "".join(script)


CHAT_ALLOWED: dict[str, Any] = {
    "type": "allowed_tools",
    "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "now"}}]},
}


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_allowed_tools(client, engine, mode):
    choice = {**CHAT_ALLOWED, "allowed_tools": {**CHAT_ALLOWED["allowed_tools"], "mode": mode}}
    response = await client.chat(tools=[WEATHER, NOW], tool_choice=choice)
    assert response.status_code == 200, response.text
    body = {
        "model": "tiny/model",
        "input": "Hi",
        "tools": [{"type": "function", "name": name} for name in ("weather", "now")],
        "tool_choice": {
            "type": "allowed_tools",
            "mode": mode,
            "tools": [{"type": "function", "name": "now"}],
        },
    }
    response = await client.http.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text
    for request in engine.submitted:
        (tool,) = request.source.options.tools
        assert tool["function"]["name"] == "now"
        assert (request.grammar is not None) == (mode == "required")


async def test_no_alternatives_may_be_asked_for_without_logprobs(client):
    response = await client.chat(logprobs=False, top_logprobs=0)
    assert response.status_code == 200
    assert response.json()["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(("effort", "thinks"), [("none", False), ("minimal", True), ("max", True)])
async def test_effort_switches_the_templates_own_thinking(client, engine, effort, thinks):
    args = {"enable_thinking": thinks, "thinking": thinks, "reasoning_effort": effort}
    response = await client.chat(reasoning_effort=effort, verbosity="low")
    assert response.status_code == 200, response.text
    assert engine.submitted[0].source.options.template_args == args
    await client.chat(reasoning_effort=effort, chat_template_kwargs={"enable_thinking": True})
    assert engine.submitted[1].source.options.template_args == {**args, "enable_thinking": True}


async def test_strict_tools_are_closed_at_every_depth_on_all_apis(client, engine):
    schema = {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {}}}}}
    base = {"name": "f", "strict": True}
    chat = {"model": "tiny/model", "messages": [HI], "max_tokens": 9}
    requests: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {
            **chat,
            "tools": [{"type": "function", "function": {**base, "parameters": schema}}],
            "tool_choice": "required",
        },
        "/v1/messages": {
            **chat,
            "tools": [{**base, "input_schema": schema}],
            "tool_choice": {"type": "any"},
        },
        "/v1/responses": {
            "model": "tiny/model",
            "input": "Hi",
            "tools": [{"type": "function", **base, "parameters": schema}],
            "tool_choice": "required",
        },
    }
    for path, body in requests.items():
        response = await client.http.post(path, json=body)
        assert response.status_code == 200, response.text
    for request in engine.submitted:
        rule = request.grammar.text.partition("%json ")[2]
        inner = json.loads(rule)["properties"]["a"]
        assert inner["additionalProperties"] is False
        assert inner["properties"] == {"b": {}}
