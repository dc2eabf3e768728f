"""POST /v1/chat/completions against a scripted engine."""

from __future__ import annotations

import pytest

from engine.request import ChatPrompt, FinishReason
from tests.server.scripted_engine import NO_DETAILS, Step

USER = {"role": "user", "content": "Say hello"}


async def test_whole_response(client, engine):
    response = await client.chat()
    body = response.json()
    assert response.status_code == 200
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert body["model"] == "tiny/model"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello world!", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 15,
        "completion_tokens": 3,
        "total_tokens": 18,
        "prompt_tokens_details": {"cached_tokens": 1},
        "completion_tokens_details": NO_DETAILS,
    }
    assert engine.submitted[0].source == ChatPrompt((USER,))
    assert engine.num_requests == 0


async def test_stream(client):
    events = await client.chat_stream()
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1
    assert all("usage" not in event for event in events)
    choices = [choice for event in events for choice in event["choices"]]
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": "", "refusal": None},
        {"content": "Hello"},
        {"content": " world"},
        {"content": "!"},
        {},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None] * 4 + ["stop"]


async def test_usage_chunk(client):
    *events, last = await client.chat_stream(stream_options={"include_usage": True})
    assert all(event["usage"] is None for event in events)
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 18


async def test_usage_is_not_sent_unasked(client):
    events = await client.chat_stream(stream_options={"include_usage": False})
    assert all("usage" not in event for event in events)


async def test_every_choice_of_a_stream_opens_with_its_role(client, engine):
    engine.pace = 0.002
    events = await client.chat_stream(n=3)
    for index in range(3):
        choices = [c for e in events for c in e["choices"] if c["index"] == index]
        assert choices[0]["delta"]["role"] == "assistant"
        assert all("role" not in choice["delta"] for choice in choices[1:])
        assert "".join(choice["delta"].get("content", "") for choice in choices) == "Hello world!"
        assert choices[-1]["finish_reason"] == "stop"


async def test_answer_without_text_still_has_role_and_end(client, engine):
    engine.script = lambda request: [Step("", (b"",), FinishReason.STOP)]
    events = await client.chat_stream()
    assert [event["choices"][0]["delta"] for event in events] == [
        {"role": "assistant", "content": "", "refusal": None},
        {},
    ]
    assert (await client.chat()).json()["choices"][0]["message"]["content"] == ""


@pytest.mark.parametrize("n", [1, 2])
async def test_stream_says_the_same_as_the_whole_response(client, engine, n):
    engine.script = lambda request: [
        Step("é", (b"\xc3", b"\xa9")),
        Step("", (b"<en",)),
        Step(" so", (b" so",)),
        Step("", (b"d>",), FinishReason.STOP, "<end>"),
    ]
    fields = {"n": n, "logprobs": True, "top_logprobs": 2}
    whole = (await client.chat(**fields)).json()
    events = await client.chat_stream(**fields)
    for choice in whole["choices"]:
        chunks = [c for e in events for c in e["choices"] if c["index"] == choice["index"]]
        text = "".join(chunk["delta"].get("content", "") for chunk in chunks)
        assert text == choice["message"]["content"] == "é so"
        entries = [entry for c in chunks if c["logprobs"] for entry in c["logprobs"]["content"]]
        assert entries == choice["logprobs"]["content"]
        assert len(entries) == 5
        assert chunks[-1]["stop_reason"] == choice["stop_reason"] == "<end>"


async def test_logprobs(client):
    choice = (await client.chat(logprobs=True, top_logprobs=3)).json()["choices"][0]
    assert choice["logprobs"]["refusal"] is None
    assert choice["logprobs"]["content"][1] == {
        "token": " world",
        "bytes": list(b" world"),
        "logprob": -0.5,
        "top_logprobs": [
            {"token": "top", "bytes": list(b"top"), "logprob": -0.25},
            {"token": " world", "bytes": list(b" world"), "logprob": -0.5},
            {"token": "bytes:\\xe2\\x80", "bytes": [0xE2, 0x80], "logprob": -9999.0},
        ],
    }


async def test_logprobs_without_alternatives(client, engine):
    choice = (await client.chat(logprobs=True)).json()["choices"][0]
    assert engine.submitted[0].params.logprobs == 0
    assert [entry["top_logprobs"] for entry in choice["logprobs"]["content"]] == [[], [], []]


async def test_content_parts_and_roles(client, engine):
    await client.chat(
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": "One", "name": "ann"},
            {"role": "assistant", "content": [{"type": "text", "text": "Two"}]},
            {
                "role": "user",
                "content": [{"type": "text", "text": "Three"}, {"type": "text", "text": "four"}],
            },
        ]
    )
    assert engine.submitted[0].source == ChatPrompt(
        (
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "One"},
            {"role": "assistant", "content": "Two"},
            {"role": "user", "content": "Three\nfour"},
        )
    )


async def test_default_max_tokens_is_the_rest_of_the_context(client, engine):
    await client.chat()
    assert engine.submitted[0].params.max_tokens == 128 - 15


@pytest.mark.parametrize(
    "limits",
    [
        {"max_tokens": 2},
        {"max_completion_tokens": 2},
        {"max_tokens": 2, "max_completion_tokens": 2},
    ],
)
async def test_max_tokens(client, limits):
    body = (await client.chat(**limits)).json()
    assert body["choices"][0]["message"]["content"] == "Hello world"
    assert body["choices"][0]["finish_reason"] == "length"


async def test_fields_that_ask_for_nothing_are_no_obstacle(client):
    response = await client.chat(
        tools=[],
        tool_choice="auto",
        functions=None,
        function_call="none",
        response_format={"type": "text"},
        modalities=["text"],
        audio=None,
        parallel_tool_calls=True,
        store=False,
        metadata={"a": "b"},
        service_tier="auto",
        a_field_nobody_knows={"x": [1, 2]},
        messages=[{"role": "user", "content": "Hi"}, {**USER, "tool_calls": None}],
    )
    assert response.status_code == 200
