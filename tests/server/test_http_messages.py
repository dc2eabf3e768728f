"""/v1/messages against a scripted engine, by hand and by the official client."""

from __future__ import annotations

import json

import anthropic
import pydantic
import pytest

from engine.request import FinishReason
from tests.server.live_server import live_server
from tests.server.scripted_engine import Step, words

HI = {"role": "user", "content": "Hi"}
WEATHER = {
    "name": "weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
SCHEMA = {"type": "json_schema", "schema": {"type": "object"}}
CALL = ["<tool_", 'call>{"name": "weather", "argu', 'ments": {"city": "Ro', 'me"}}</tool_call>']


@pytest.fixture
def ask(client):
    async def ask(path="/v1/messages", **fields):
        body = {"model": "tiny/model", "messages": [HI], "max_tokens": 9, **fields}
        return await client.http.post(path, json={k: v for k, v in body.items() if v != "absent"})

    return ask


def named_events(response):
    assert response.status_code == 200, response.text
    *events, rest = response.content.decode().split("\n\n")
    assert rest == ""
    parsed = []
    for event in events:
        name, data = event.split("\n")
        parsed.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {parsed[-1]['type']}"
    return parsed


async def test_whole_message(ask, engine):
    body = (await ask(system="Be brief.", temperature=0.5, top_k=3, top_p=0.5)).json()
    assert body.pop("id").startswith("msg_")
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": "tiny/model",
        "content": [{"type": "text", "text": "Hello world!"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 24,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 1,
            "output_tokens": 3,
        },
    }
    params = engine.submitted[0].params
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (9, 0.5, 3, 0.5)
    assert engine.submitted[0].source.messages == (
        {"role": "system", "content": "Be brief."},
        HI,
    )


async def test_stream(ask):
    events = named_events(await ask(stream=True))
    assert [event["type"] for event in events] == [
        "message_start", "content_block_start", "content_block_delta", "content_block_delta",
        "content_block_delta", "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert events[0]["message"]["usage"] == {
        "input_tokens": 8,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": 0,
    }
    assert events[1]["content_block"] == {"type": "text", "text": ""}
    assert "".join(event["delta"]["text"] for event in events[2:5]) == "Hello world!"
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 3
    assert events[-2]["usage"]["cache_read_input_tokens"] == 1


@pytest.mark.parametrize(
    ("step", "reason", "sequence"),
    [
        (Step("a", (b"a",), FinishReason.LENGTH), "max_tokens", None),
        (Step("a", (b"a",), FinishReason.STOP, "END"), "stop_sequence", "END"),
        (Step("a", (b"a",), FinishReason.STOP), "end_turn", None),
    ],
)
async def test_stop_reasons(ask, engine, step, reason, sequence):
    engine.script = lambda request: [step]
    body = (await ask(stop_sequences=["END"])).json()
    assert engine.submitted[0].params.stop == ("END",)
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, sequence)
    delta = named_events(await ask(stream=True))[-2]["delta"]
    assert (delta["stop_reason"], delta["stop_sequence"]) == (reason, sequence)


async def test_tools(ask, engine):
    engine.script = lambda request: words("So:\n", *CALL)
    whole = (await ask(tools=[WEATHER])).json()
    text, call = whole["content"]
    assert text == {"type": "text", "text": "So:"}
    assert call.pop("id").startswith("toolu_")
    assert call == {"type": "tool_use", "name": "weather", "input": {"city": "Rome"}}
    assert whole["stop_reason"] == "tool_use"
    (tool,) = engine.submitted[0].source.options.tools
    assert tool["function"]["parameters"] == WEATHER["input_schema"]
    events = named_events(await ask(tools=[WEATHER], stream=True))
    deltas = [e["delta"] for e in events if e["type"] == "content_block_delta" and e["index"] == 1]
    assert "".join(delta["partial_json"] for delta in deltas) == '{"city": "Rome"}'
    (start,) = (e for e in events if e["type"] == "content_block_start" and e["index"] == 1)
    assert start["content_block"]["input"] == {}
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


async def test_call_that_was_cut_off(ask, engine):
    engine.script = lambda request: words(*CALL[:3], finish=FinishReason.LENGTH)
    body = (await ask(tools=[WEATHER])).json()
    assert body["stop_reason"] == "max_tokens"
    assert body["content"][0]["input"] == {}


async def test_conversation_with_tools(ask, engine):
    use = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}}
    result = {
        "type": "tool_result",
        "tool_use_id": "t1",
        "content": [{"type": "text", "text": "Sun"}],
    }
    thinking = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
    empty = {"type": "tool_result", "tool_use_id": "t2"}
    response = await ask(
        system=[{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}],
        messages=[
            HI,
            {"role": "assistant", "content": [thinking, {"type": "text", "text": "So:"}, use]},
            {"role": "user", "content": [{"type": "text", "text": "And?"}, result, empty]},
        ],
        tools=[WEATHER],
        tool_choice={"type": "auto"},
    )
    assert response.status_code == 200
    call = {"name": "weather", "arguments": {"city": "Rome"}}
    assert engine.submitted[0].source.messages == (
        {"role": "system", "content": "a"},
        HI,
        {
            "role": "assistant",
            "content": "So:",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "t1", "type": "function", "function": call}],
        },
        {"role": "tool", "content": "Sun", "tool_call_id": "t1"},
        {"role": "tool", "content": "", "tool_call_id": "t2"},
        {"role": "user", "content": "And?"},
    )


async def test_answer_begun_by_the_client_is_continued(ask, engine):
    response = await ask(messages=[HI, {"role": "assistant", "content": "Well, "}])
    assert response.status_code == 200
    options = engine.submitted[0].source.options
    assert (options.continue_final_message, options.add_generation_prompt) == (True, False)


@pytest.mark.parametrize(
    ("thinking", "meant"),
    [
        (None, False),
        ({"type": "disabled"}, False),
        ({"type": "enabled", "budget_tokens": 1024}, True),
        ({"type": "adaptive"}, True),
    ],
)
async def test_thinking(ask, engine, thinking, meant):
    engine.tokenizer.chat_template.source = "</think>"
    engine.script = lambda request: words("<think>", "Hm", "</think>", "Yes")
    body = (await ask(thinking=thinking)).json()
    assert engine.submitted[0].source.options.template_args == {
        "enable_thinking": meant,
        "thinking": meant,
    }
    assert body["content"] == [
        {"type": "thinking", "thinking": "Hm", "signature": ""},
        {"type": "text", "text": "Yes"},
    ]


def billing(cch):
    return f"x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch={cch};"


@pytest.mark.parametrize(
    "system",
    [
        lambda cch: [{"type": "text", "text": billing(cch)}, {"type": "text", "text": "You code."}],
        lambda cch: [{"type": "text", "text": f"{billing(cch)}\n\nYou code."}],
        lambda cch: f"{billing(cch)}\nYou code.",
    ],
)
async def test_claude_codes_accounting_line_is_no_part_of_the_prompt(ask, engine, system):
    for cch in ("36ee5", "0aaa9"):
        assert (await ask(system=system(cch))).status_code == 200
    first, second = engine.submitted
    assert first.prompt_token_ids == second.prompt_token_ids
    assert first.source.messages == ({"role": "system", "content": "You code."}, HI)
    counted = [
        (await ask("/v1/messages/count_tokens", max_tokens="absent", system=each)).json()
        for each in (system("36ee5"), "You code.")
    ]
    assert counted[0] == counted[1]


async def test_the_line_elsewhere_is_text(ask, engine):
    engine.max_context = 1000
    system = f"Never write\n{billing(1)}"
    messages = [{"role": "user", "content": billing(2)}]
    await ask(system=system, messages=messages)
    assert engine.submitted[0].source.messages == (
        {"role": "system", "content": system}, *messages
    )  # fmt: skip
    assert (await ask(system=billing(3))).status_code == 200
    assert engine.submitted[1].source.messages == (HI,)


async def test_system_message_in_mid_conversation(ask, engine):
    reminder = {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}
    assert (await ask(messages=[HI, reminder, HI])).status_code == 200
    assert engine.submitted[0].source.messages[1] == {"role": "system", "content": "Be brief."}


async def test_redacted_thinking_is_passed_over(ask, engine):
    redacted = {"type": "redacted_thinking", "data": "AA"}
    answer = {"role": "assistant", "content": [redacted, {"type": "text", "text": "So:"}]}
    assert (await ask(messages=[HI, answer, HI])).status_code == 200
    assert engine.submitted[0].source.messages[1] == {"role": "assistant", "content": "So:"}


@pytest.mark.parametrize(
    "fields", [{"output_config": {"format": SCHEMA, "effort": "high"}}, {"output_format": SCHEMA}]
)
async def test_structured_output(ask, engine, fields):
    assert (await ask(**fields)).status_code == 200
    (request,) = engine.submitted
    assert (request.grammar.kind, json.loads(request.grammar.text)) == (
        "json_schema", SCHEMA["schema"]
    )  # fmt: skip
    effort = request.source.options.template_args.get("reasoning_effort")
    assert effort == ("high" if "output_config" in fields else None)


async def test_tools_that_the_server_lacks(ask, engine, caplog):
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    assert (await ask(tools=[search, WEATHER])).status_code == 200
    (tool,) = engine.submitted[0].source.options.tools
    assert tool["function"]["name"] == "weather"
    assert "a tool of type 'web_search_20250305' is left out" in caplog.text
    error = (await ask(tools=[search])).json()["error"]
    assert "no tools of type 'web_search_20250305'" in error["message"]


async def test_count_tokens(ask, engine):
    fields = {"system": "Be brief.", "tools": [WEATHER]}
    response = await ask("/v1/messages/count_tokens", max_tokens="absent", **fields)
    usage = (await ask(**fields)).json()["usage"]
    total = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert response.json() == {"input_tokens": total}
    assert len(engine.submitted) == 1


async def test_error_in_mid_stream(ask, engine):
    engine.script = lambda request: [
        *words("a", finish=None),
        Step("", (), FinishReason.ERROR, error="It broke."),
    ]
    last = named_events(await ask(stream=True))[-1]
    assert last == {"type": "error", "error": {"type": "api_error", "message": "It broke."}}


def block(**fields):
    return {"messages": [{"role": "user", "content": [fields]}]}


INVALID = [
    ({"max_tokens": "absent"}, "max_tokens"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 125}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"messages": "absent"}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": ["Hi"]}, "messages.0"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": [5]}]}, "messages.0.content.0"),
    (block(type="image", source={}), "messages.0.content.0"),
    (block(type="text"), "messages.0.content.0.text"),
    (block(type="text", text=5), "messages.0.content.0.text"),
    (block(type="tool_result"), "messages.0.content.0.tool_use_id"),
    (block(type="tool_result", tool_use_id="x", content=5), "messages.0.content.0.content"),
    (block(type="tool_use", id="x", name="f", input={}), "messages.0.content.0"),
    (block(type="tool_use", id="x", name="f", input="{}"), "messages.0.content.0.input"),
    (block(type="thinking", thinking="x"), "messages.0.content.0"),
    (
        {
            "messages": [
                {"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "x"}]}
            ]
        },
        "messages.0.content.0",
    ),
    ({"messages": [{"role": "user", "content": "x" * 200}]}, "prompt"),
    ({"system": 5}, "system"),
    ({"system": [{"type": "image"}]}, "system.0"),
    ({"system": [{"type": "poem"}]}, "system.0.type"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences.0"),
    ({"stop_sequences": ["a", "b", "c"]}, "stop"),
    ({"temperature": 1.5}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"top_k": -1}, "top_k"),
    ({"top_p": 2}, "top_p"),
    ({"stream": "yes"}, "stream"),
    ({"metadata": 5}, "metadata"),
    ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools.0.name"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.type"),
    ({"tools": [{"type": 5, "name": "bash"}]}, "tools.0"),
    ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ({"output_config": {"effort": "huge"}}, "output_config.effort"),
    ({"output_config": {"format": {**SCHEMA, "schema": {"type": "broken"}}}}, "'output_config.f"),
    ({"output_format": {**SCHEMA, "schema": {"type": "broken"}}}, "'output_format.schema'"),
    ({"output_format": SCHEMA, "output_config": {"format": SCHEMA}}, "output_format"),
    ({"tools": [WEATHER, WEATHER]}, "weather"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": "auto"}, "tool_choice"),
    ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
    ({"thinking": True}, "thinking"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
]


@pytest.mark.parametrize(("fields", "named"), INVALID)
async def test_invalid_input(ask, engine, fields, named):
    response = await ask(**fields)
    assert response.status_code == 400, response.text
    body = response.json()
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert named in body["error"]["message"]
    assert engine.num_requests == 0
    assert (await ask()).status_code == 200


async def test_errors_of_other_kinds_have_anthropics_shape(ask, client, engine):
    response = await ask(model="other")
    assert (response.status_code, response.json()["error"]["type"]) == (404, "not_found_error")
    response = await ask(system="x" * 5000)
    assert (response.status_code, response.json()["error"]["type"]) == (413, "request_too_large")
    response = await client.http.post("/v1/messages", content=b"{", headers={"content-type": "x"})
    assert (response.status_code, response.json()["type"]) == (415, "error")
    engine.max_requests = 0
    response = await ask()
    assert (response.status_code, response.json()["error"]["type"]) == (429, "rate_limit_error")
    engine.submit = None
    response = await ask()
    assert (response.status_code, response.json()["error"]["type"]) == (500, "api_error")


@pytest.fixture
def anthropic_client(app):
    with (
        live_server(app) as url,
        anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client,
    ):
        yield client


def test_anthropic_package(anthropic_client, engine):
    engine.script = lambda request: words("So:", *CALL)
    fields = {"model": "tiny/model", "max_tokens": 50, "messages": [HI], "tools": [WEATHER]}
    whole = anthropic_client.messages.create(**fields)
    with anthropic_client.messages.stream(**fields) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "So:"
    for message in (whole, final):
        assert message.content[0].text == "So:"
        assert (message.content[1].name, message.content[1].input) == ("weather", {"city": "Rome"})
        assert message.stop_reason == "tool_use"
        assert message.usage.output_tokens == 5
    counted = anthropic_client.messages.count_tokens(
        model="tiny/model", messages=[HI], tools=[WEATHER]
    )
    assert counted.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens


class City(pydantic.BaseModel):
    name: str
    rank: int


def test_anthropic_package_parses_structured_output(anthropic_client, engine):
    engine.script = lambda request: words('{"name": "Rome", ', '"rank": 3}')
    fields = {"model": "tiny/model", "max_tokens": 50, "messages": [HI], "output_format": City}
    for messages in (anthropic_client.messages, anthropic_client.beta.messages):
        assert messages.parse(**fields).parsed_output == City(name="Rome", rank=3)
    assert [request.grammar.kind for request in engine.submitted] == ["json_schema"] * 2


def test_anthropic_package_meets_errors(anthropic_client, engine):
    fields = {"model": "tiny/model", "max_tokens": 50, "messages": [HI]}
    with pytest.raises(anthropic.NotFoundError):
        anthropic_client.messages.create(**{**fields, "model": "x"})
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        anthropic_client.messages.create(**{**fields, "max_tokens": 1000})
    engine.script = lambda request: [
        *words("a", finish=None),
        Step("", (), FinishReason.ERROR, error="It broke."),
    ]
    with (
        pytest.raises(anthropic.APIStatusError, match=r"It broke\."),
        anthropic_client.messages.stream(**fields) as stream,
    ):
        stream.until_done()
