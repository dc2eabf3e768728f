"""/v1/responses against a scripted engine."""

from __future__ import annotations

import json

import openai
import pydantic
import pytest

from engine.request import FinishReason
from server.apis.responses.store import ResponseStore, StoredResponse
from server.apis.shared.prompt.message_builder import MessageBuilder
from tests.server.live_server import live_server
from tests.server.scripted_engine import Step, words

WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
CALL = ["<tool_", 'call>{"name": "weather", "argu', 'ments": {"city": "Ro', 'me"}}</tool_call>']


@pytest.fixture
def respond(client):
    async def respond(**fields):
        body = {"model": "tiny/model", "input": "Hi", **fields}
        return await client.http.post("/v1/responses", json=body)

    return respond


def named_events(response):
    assert response.status_code == 200, response.text
    *events, rest = response.content.decode().split("\n\n")
    assert rest == ""
    parsed = []
    for event in events:
        name, data = event.split("\n")
        parsed.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {parsed[-1]['type']}"
    assert [event["sequence_number"] for event in parsed] == list(range(len(parsed)))
    return parsed


async def test_whole_response(respond, engine):
    body = (await respond(instructions="Be brief.", metadata={"a": "b"}, user="me")).json()
    (item,) = body.pop("output")
    assert body.pop("id").startswith("resp_")
    assert item.pop("id").startswith("msg_")
    part = {"type": "output_text", "text": "Hello world!", "annotations": [], "logprobs": []}
    assert item == {
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [part],
    }
    assert body.pop("created_at") > 0
    assert body == {
        "object": "response",
        "status": "completed",
        "model": "tiny/model",
        "usage": {
            "input_tokens": 25,
            "input_tokens_details": {"cached_tokens": 1},
            "output_tokens": 3,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 28,
        },
        "error": None,
        "incomplete_details": None,
        "instructions": "Be brief.",
        "max_output_tokens": None,
        "metadata": {"a": "b"},
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": True,
        "temperature": 1.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
        "truncation": "disabled",
        "user": "me",
    }
    assert engine.submitted[0].source.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    )


async def test_stream(respond):
    events = named_events(await respond(stream=True))
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta",
        "output_text.delta", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done", "completed",
    ]  # fmt: skip
    assert events[2]["item"]["content"] == []
    assert events[3]["part"]["text"] == ""
    assert [event["delta"] for event in events[4:7]] == ["Hello", " world", "!"]
    assert events[7]["text"] == events[8]["part"]["text"] == "Hello world!"
    assert len({event["item_id"] for event in events[3:9]}) == 1
    assert events[-1]["response"]["output"] == [events[9]["item"]]
    assert events[-1]["response"]["usage"]["output_tokens"] == 3
    assert events[0]["response"]["status"] == "in_progress"


@pytest.mark.parametrize("stream", [False, True])
async def test_cut_off(respond, engine, stream):
    response = await respond(max_output_tokens=2, stream=stream)
    body = named_events(response)[-1]["response"] if stream else response.json()
    assert engine.submitted[0].params.max_tokens == 2
    assert body["status"] == body["output"][0]["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}


async def test_calls_and_their_outputs(respond, engine):
    engine.script = lambda request: words("So:\n", *CALL, "\n", *CALL)
    events = named_events(await respond(tools=[WEATHER], stream=True))
    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["message", "function_call", "function_call"]
    assert output[0]["content"][0]["text"] == "So:"
    deltas = [e["delta"] for e in events if e["type"].endswith("arguments.delta")]
    assert "".join(deltas) == '{"city": "Rome"}' * 2
    done = [e for e in events if e["type"].endswith("arguments.done")]
    for item, event in zip(output[1:], done, strict=True):
        assert item["arguments"] == event["arguments"] == '{"city": "Rome"}'
        assert (item["id"], item["name"]) == (event["item_id"], "weather")
    first, second = (item["call_id"] for item in output[1:])
    assert first != second
    engine.script = lambda request: words("Sun.")
    answers = [
        {"type": "function_call_output", "call_id": call_id, "output": "Sun"}
        for call_id in (first, second)
    ]
    previous = events[-1]["response"]["id"]
    by_id = await respond(input=answers, previous_response_id=previous, tools=[WEATHER])
    by_items = await respond(
        input=[{"role": "user", "content": "Hi"}, *output, *answers], tools=[WEATHER]
    )
    assert by_id.status_code == by_items.status_code == 200
    calls = [
        {
            "id": call_id,
            "type": "function",
            "function": {"name": "weather", "arguments": {"city": "Rome"}},
        }
        for call_id in (first, second)
    ]
    for request in engine.submitted[1:]:
        assert request.source.messages == (
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "So:", "tool_calls": calls},
            {"role": "tool", "content": "Sun", "tool_call_id": first},
            {"role": "tool", "content": "Sun", "tool_call_id": second},
        )


async def test_reasoning_is_an_item_of_its_own(respond, engine):
    engine.tokenizer.chat_template.source = "</think>"
    engine.script = lambda request: words("<think>", "Hm", ".</think>", "Yes")
    events = named_events(await respond(stream=True, reasoning={"effort": "low"}))
    reasoning, message = events[-1]["response"]["output"]
    assert (reasoning["type"], reasoning["content"][0]["text"]) == ("reasoning", "Hm.")
    assert message["content"][0]["text"] == "Yes"
    deltas = [e["delta"] for e in events if e["type"] == "response.reasoning_text.delta"]
    assert "".join(deltas) == "Hm."
    assert engine.submitted[0].source.options.template_args == {
        "enable_thinking": True,
        "thinking": True,
        "reasoning_effort": "low",
    }
    await respond(
        input=[
            {"role": "user", "content": "Hi"},
            reasoning,
            message,
            {"role": "user", "content": "So?"},
        ]
    )
    assert engine.submitted[-1].source.messages[1] == {
        "role": "assistant",
        "content": "Yes",
        "reasoning_content": "Hm.",
    }


async def test_previous_responses_carry_the_conversation_on_but_not_the_instructions(
    respond, engine
):
    first = (await respond(instructions="Be brief.")).json()
    second = (await respond(input="More", previous_response_id=first["id"])).json()
    await respond(input="And?", previous_response_id=second["id"])
    assert second["previous_response_id"] == first["id"]
    assert [message["content"] for message in engine.submitted[-1].source.messages] == [
        "Hi", "Hello world!", "More", "Hello world!", "And?"
    ]  # fmt: skip
    # Two answers to the same response know nothing of each other.
    await respond(input="Else", previous_response_id=first["id"])
    assert [message["content"] for message in engine.submitted[-1].source.messages] == [
        "Hi", "Hello world!", "Else"
    ]  # fmt: skip


async def test_stored_responses_can_be_read_and_deleted(respond, client):
    for stream in (False, True):
        response = await respond(stream=stream)
        body = named_events(response)[-1]["response"] if stream else response.json()
        path = f"/v1/responses/{body['id']}"
        assert (await client.http.get(path)).json() == body
        deleted = (await client.http.delete(path)).json()
        assert deleted == {"id": body["id"], "object": "response", "deleted": True}
        for method in ("GET", "DELETE"):
            response = await client.http.request(method, path)
            assert response.status_code == 404
            assert response.json()["error"]["code"] == "response_not_found"


async def test_what_is_not_to_be_stored_is_not(respond, client):
    body = (await respond(store=False)).json()
    assert (await client.http.get(f"/v1/responses/{body['id']}")).status_code == 404
    response = await respond(previous_response_id=body["id"])
    assert response.status_code == 404
    assert response.json()["error"]["param"] == "previous_response_id"


async def test_engines_ids_do_not_give_access_to_responses(respond, engine):
    body = (await respond()).json()
    assert body["id"] not in engine.submitted[0].request_id


async def test_error_in_mid_stream(respond, engine):
    engine.script = lambda request: [
        *words("a", finish=None),
        Step("", (), FinishReason.ERROR, error="It broke."),
    ]
    *_, failed, last = named_events(await respond(stream=True))
    assert (last["type"], last["message"]) == ("error", "It broke.")
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": "generation_failed", "message": "It broke."}
    (item,) = failed["response"]["output"]
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", "a")
    assert (await respond()).status_code == 500


SCHEMA_FORMAT = {
    "type": "json_schema",
    "name": "city",
    "schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}


@pytest.mark.parametrize(
    ("wanted", "kind"),
    [({"type": "text"}, None), ({"type": "json_object"}, "json_object"),
     (SCHEMA_FORMAT, "json_schema")],
)  # fmt: skip
async def test_text_format(respond, client, engine, wanted, kind):
    response = await respond(text={"format": wanted, "verbosity": "high"})
    assert response.status_code == 200, response.text
    assert response.json()["text"] == {"format": wanted, "verbosity": "high"}
    grammar = engine.submitted[0].grammar
    assert (None if grammar is None else grammar.kind) == kind
    if kind == "json_schema":
        inner = {key: value for key, value in wanted.items() if key != "type"}
        await client.chat(response_format={"type": "json_schema", "json_schema": inner})
        assert engine.submitted[1].grammar == grammar


async def test_tools_that_the_server_lacks(respond, engine, caplog):
    hosted = [{"type": "web_search"}, {"type": "mcp", "server_label": "x"}]
    response = await respond(tools=[*hosted, WEATHER])
    assert response.status_code == 200, response.text
    assert [tool["type"] for tool in response.json()["tools"]] == ["function"]
    (tool,) = engine.submitted[0].source.options.tools
    assert tool["function"]["name"] == "weather"
    assert "'web_search'" in caplog.text
    assert "'mcp'" in caplog.text
    error = (await respond(tools=hosted)).json()["error"]
    assert error["message"] == "'tools.0.type': this server has no tools of type 'web_search'."


async def test_what_may_be_included(respond):
    wanted = ["reasoning.encrypted_content", "file_search_call.results"]
    assert (await respond(include=wanted)).status_code == 200
    error = (await respond(include=["message.output_text.logprobs"])).json()["error"]
    assert "'message.output_text.logprobs'" in error["message"]


def turns(*sizes):
    """A conversation of as many bytes a turn, as the scripted template writes it."""
    messages = []
    for number, size in enumerate(sizes):
        answer = {"role": "assistant", "content": ""}
        question = {"role": "user", "content": ""}
        text = str(number) * (size - len("<user><assistant>"))
        messages += [{**question, "content": text}, answer]
    return messages[:-1]


@pytest.mark.parametrize(
    ("sizes", "max_tokens", "kept"),
    [
        ((30, 30, 30), None, "012"),
        ((50, 50, 50), None, "2"),  # a fourth of 128 is for the answer
        ((50, 40, 40, 40), None, "23"),
        ((50, 40, 40, 40), 5, "123"),
        ((50, 50, 50), 60, "2"),
        ((40, 200, 40), 40, "2"),
    ],
)
async def test_truncation_drops_the_oldest_turns_whole(respond, engine, sizes, max_tokens, kept):
    fields = {"input": turns(*sizes), "max_output_tokens": max_tokens, "instructions": "Be"}
    response = await respond(truncation="auto", **fields)
    assert response.status_code == 200, response.text
    assert response.json()["truncation"] == "auto"
    first, *messages = engine.submitted[0].source.messages
    assert first == {"role": "system", "content": "Be"}
    assert "".join(m["content"][0] for m in messages if m["role"] == "user") == kept
    assert [m["role"] for m in messages[:2]] != ["assistant"]
    if len(kept) < len(sizes):
        assert (await respond(**fields)).json()["error"]["code"] == "context_length_exceeded"


async def test_last_turn_is_never_dropped(respond):
    response = await respond(input=turns(30, 200), truncation="auto")
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


async def test_whole_conversation_is_kept_behind_a_truncated_one(respond, engine):
    first = (await respond(input=turns(50, 50, 50), truncation="auto")).json()
    engine.max_context = 1000
    await respond(input="And?", previous_response_id=first["id"])
    assert len(engine.submitted[-1].source.messages) == len(turns(50, 50, 50)) + 2


def test_store_is_bounded_in_number_and_size():
    def stored(size):
        return StoredResponse(b"x" * size, ())

    store = ResponseStore(max_responses=3, max_bytes=1000)
    for name in "abc":
        store.put("me", name, stored(100))
    assert store.get("me", "a") is not None
    store.put("me", "d", stored(100))
    assert [name for name in "abcd" if store.get("me", name)] == ["a", "c", "d"]
    store.put("me", "e", stored(900))
    assert [name for name in "abcde" if store.get("me", name)] == ["e"]
    store.put("me", "f", stored(5000))
    assert [name for name in "ef" if store.get("me", name)] == ["e"]
    assert store.num_bytes == 902
    store.put("me", "e", stored(5000))
    assert len(store) == 0
    assert store.num_bytes == 0
    store.put("me", "g", stored(10))
    store.put("me", "g", stored(20))
    assert store.num_bytes == 22
    assert store.delete("me", "g")
    assert not store.delete("me", "g")
    assert store.num_bytes == 0


def test_store_counts_bytes():
    message = {"role": "user", "content": "\N{GRINNING FACE}" * 100}
    stored = StoredResponse(b"{}", (message,))
    assert stored.num_bytes == len(b"{}") + len(b'[{"role":"user","content":""}]') + 400


def test_builder_does_not_change_what_it_was_given():
    given = ({"role": "assistant", "content": "a"},)
    builder = MessageBuilder(given)
    builder.add_text("b")
    assert given[0]["content"] == "a"
    assert len(builder.messages) == 2


HI = {"role": "user", "content": "Hi"}
BROKEN_FORMAT = {"type": "json_schema", "name": "a", "schema": {"type": "broken"}}
BROKEN_CHAT_FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "a", "schema": {"type": "broken"}},
}
INVALID = [
    ({"input": None}, "input"),
    ({"input": 5}, "input"),
    ({"input": []}, "input"),
    ({"input": ["Hi"]}, "input.0"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
    ({"input": [{"role": "user"}]}, "input.0.content"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input.0.role"),
    ({"input": [{"role": "user", "content": 5}]}, "input.0.content"),
    ({"input": [{"role": "user", "content": [5]}]}, "input.0.content.0"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input.0.content.0",
    ),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input.0.call_id"),
    ({"input": [{"type": "function_call_output", "call_id": "x"}]}, "input.0.output"),
    ({"input": [{"type": "reasoning", "content": "x"}]}, "input.0.content"),
    ({"input": "x" * 200}, "input"),
    ({"instructions": 5}, "instructions"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 10**30}, "max_output_tokens"),
    ({"max_output_tokens": 125}, "max_output_tokens"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
    ({"tools": [{"type": "function"}]}, "tools.0.name"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools.0.name"),
    ({"tools": [WEATHER, WEATHER]}, "tools.1"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
    ({"tool_choice": {"type": "file_search"}}, "tool_choice.type"),
    ({"tool_choice": 5}, "tool_choice"),
    ({"previous_response_id": 5}, "previous_response_id"),
    ({"store": "yes"}, "store"),
    ({"metadata": {"a": 5}}, "metadata.a"),
    ({"metadata": []}, "metadata"),
    ({"reasoning": "high"}, "reasoning"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ({"text": {"format": {"type": "xml"}}}, "text.format"),
    ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
    ({"text": {"verbosity": "loud"}}, "text.verbosity"),
    ({"text": {"format": BROKEN_FORMAT}}, "text.format.schema"),
    ({"response_format": BROKEN_CHAT_FORMAT}, "response_format.json_schema.schema"),
    (
        {"text": {"format": {"type": "text"}}, "response_format": {"type": "json_object"}},
        "response_format",
    ),
    ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "guided_regex"),
    ({"truncation": "latest"}, "truncation"),
    ({"include": ["message.output_text.logprobs"]}, "include"),
    ({"background": True}, "background"),
    ({"conversation": "x"}, "conversation"),
    ({"include": ["x"]}, "include"),
    ({"prompt": {"id": "x"}}, "prompt"),
    ({"n": 2}, "n"),
    ({"temperature": 3}, "temperature"),
    ({"top_p": "1"}, "top_p"),
    ({"stream": 1}, "stream"),
    ({"chat_template": "x"}, "chat_template"),
    ({"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs.x"),
]


@pytest.mark.parametrize(("fields", "param"), INVALID)
async def test_invalid_input(respond, engine, fields, param):
    response = await respond(**fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param, error
    assert param.partition(".")[0] in error["message"] or param == "input"
    assert engine.num_requests == 0
    assert (await respond()).status_code == 200


@pytest.fixture
def openai_client(app):
    with (
        live_server(app) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def test_openai_package(openai_client, engine):
    engine.script = lambda request: words("So:", *CALL)
    fields = {"model": "tiny/model", "input": "Hi", "tools": [WEATHER]}
    whole = openai_client.responses.create(**fields)
    with openai_client.responses.stream(**fields) as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert whole.output_text == final.output_text == text == "So:"
    for response in (whole, final):
        call = response.output[1]
        assert (call.type, call.name, call.arguments) == (
            "function_call", "weather", '{"city": "Rome"}'
        )  # fmt: skip
    assert openai_client.responses.retrieve(whole.id).output_text == "So:"
    openai_client.responses.delete(whole.id)
    with pytest.raises(openai.NotFoundError):
        openai_client.responses.retrieve(whole.id)


class City(pydantic.BaseModel):
    name: str
    rank: int


def test_openai_package_parses_structured_output(openai_client, engine):
    engine.script = lambda request: words('{"name": "Rome", ', '"rank": 3}')
    fields = {"model": "tiny/model", "input": "Hi", "text_format": City}
    whole = openai_client.responses.parse(
        **fields,
        text={"verbosity": "low"},
        truncation="auto",
        include=["reasoning.encrypted_content"],
    )
    with openai_client.responses.stream(**fields) as stream:
        streamed = stream.get_final_response()
    for response in (whole, streamed):
        assert response.output_parsed == City(name="Rome", rank=3)
    assert [request.grammar.kind for request in engine.submitted] == ["json_schema"] * 2
