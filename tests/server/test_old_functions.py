"""`functions` and `function_call`, the chat API's old form of tools."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from engine.config import LimitsConfig
from server.apis.shared.grammar.tool_calls import (
    ForcedCall,
    ToolCalls,
    grammar_for_tools,
    prepared_tools,
)
from tests.server.live_server import live_server
from tests.server.scripted_engine import words

HI: Any = {"role": "user", "content": "Hi"}
WEATHER: Any = {
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
NOW = {"name": "now"}
CALL = ["<tool_", 'call>{"name": "weather", "argu', 'ments": {"city": "Ro', 'me"}}</tool_call>']
CALLED = {"name": "weather", "arguments": '{"city": "Rome"}'}


async def test_call_in_the_old_form(client, engine):
    engine.script = lambda request: words(*CALL)
    choice = (await client.chat(functions=[WEATHER, NOW])).json()["choices"][0]
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "function_call": CALLED,
    }
    assert choice["finish_reason"] == "function_call"
    tools = engine.submitted[0].source.options.tools
    assert [tool["function"] for tool in tools] == [WEATHER, NOW]


async def test_stream_in_the_old_form(client, engine):
    engine.script = lambda request: words(*CALL, *CALL)
    chunks = [e["choices"][0] for e in await client.chat_stream(functions=[WEATHER])]
    deltas = [chunk["delta"] for chunk in chunks]
    assert not any("tool_calls" in delta for delta in deltas)
    calls = [delta["function_call"] for delta in deltas if "function_call" in delta]
    assert [call["name"] for call in calls if "name" in call] == ["weather"]
    assert "".join(call["arguments"] for call in calls) == CALLED["arguments"]
    assert chunks[-1]["finish_reason"] == "function_call"


async def test_text_in_answer_to_functions(client):
    choice = (await client.chat(functions=[WEATHER])).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Hello world!", "stop")
    assert "function_call" not in choice["message"]


async def test_choice_of_a_function_is_forced(client, engine):
    await client.chat(functions=[WEATHER, NOW], function_call={"name": "now"})
    tools = [{"type": "function", "function": function} for function in (WEATHER, NOW)]
    calls = ToolCalls(tools, "hermes", 1, ForcedCall("now"))
    wanted = grammar_for_tools(calls, prepared_tools(calls, LimitsConfig()))
    assert engine.submitted[0].grammar == wanted
    await client.chat(functions=[WEATHER], function_call="none")
    assert engine.submitted[1].source.options.tools == ()
    await client.chat(functions=[WEATHER], function_call="auto")
    assert len(engine.submitted[2].source.options.tools) == 1


async def test_history_in_the_old_form(client, engine):
    messages = [
        HI,
        {"role": "assistant", "content": None, "function_call": CALLED},
        {"role": "function", "name": "weather", "content": "Sun"},
        {"role": "assistant", "content": "Sunny.", "function_call": None},
        HI,
    ]
    assert (await client.chat(messages=messages)).status_code == 200
    _, asked, told, *_ = engine.submitted[0].source.messages
    (call,) = asked["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": {"city": "Rome"}}
    assert told == {
        "role": "tool",
        "content": "Sun",
        "tool_call_id": call["id"],
        "name": "weather",
    }
    assert len(call["id"]) == 9
    assert call["id"].isalnum()
    body = {"messages": messages}
    assert (await client.http.post("/tokenize", json=body)).status_code == 200


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_openai_package(app, engine):
    engine.script = lambda request: words(*CALL)
    with (
        live_server(app) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        answer = client.chat.completions.create(
            model="tiny/model", messages=[HI], functions=[WEATHER]
        )
        call = answer.choices[0].message.function_call
        assert (call.name, call.arguments) == ("weather", '{"city": "Rome"}')
        assert answer.choices[0].finish_reason == "function_call"
