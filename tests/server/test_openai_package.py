"""The official client against a real socket and a scripted engine."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from engine.request import FinishReason
from tests.server.live_server import live_server
from tests.server.scripted_engine import Step, words

HI: list[Any] = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def url(app):
    with live_server(app) as url:
        yield f"{url}/v1"


@pytest.fixture
def openai_client(url):
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def test_models(openai_client):
    assert [model.id for model in openai_client.models.list()] == ["tiny/model"]
    assert openai_client.models.retrieve("tiny/model").owned_by == "slipstream"


def test_completion(openai_client):
    completion = openai_client.completions.create(
        model="tiny/model", prompt=["a", "b"], n=2, logprobs=2, echo=True
    )
    assert [choice.text for choice in completion.choices] == [
        "aHello world!", "aHello world!", "bHello world!", "bHello world!"
    ]  # fmt: skip
    assert completion.choices[0].logprobs.tokens == ["a", "Hello", " world", "!"]
    assert completion.usage.completion_tokens == 12
    assert completion.usage.prompt_tokens_details.cached_tokens == 2


def test_completion_stream(openai_client):
    stream = openai_client.completions.create(
        model="tiny/model", prompt="a", stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello world!"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert (last.choices, last.usage.total_tokens) == ([], 4)


def test_chat(openai_client):
    completion = openai_client.chat.completions.create(
        model="tiny/model", messages=HI, logprobs=True, top_logprobs=2, n=2
    )
    for choice in completion.choices:
        assert choice.message.role == "assistant"
        assert choice.message.content == "Hello world!"
        assert choice.message.tool_calls is None
        assert choice.finish_reason == "stop"
        assert choice.logprobs.content[0].top_logprobs[0].token == "top"
    assert completion.usage.total_tokens == 8 + 6


def test_chat_stream_helper(openai_client, engine):
    engine.script = lambda request: words("Hé", "llo 😀")
    with openai_client.chat.completions.stream(model="tiny/model", messages=HI) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == final.choices[0].message.content == "Héllo 😀"


async def test_async_chat_stream(url):
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model="tiny/model",
            messages=HI,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "Hello world!"
    assert chunks[-1].usage.prompt_tokens == 8


@pytest.mark.parametrize(
    ("fields", "error", "param", "code"),
    [
        ({"model": "x"}, openai.NotFoundError, "model", "model_not_found"),
        ({"temperature": 3}, openai.BadRequestError, "temperature", None),
        ({"max_tokens": 10**6}, openai.BadRequestError, "max_tokens", "context_length_exceeded"),
        ({"n": 3}, openai.RateLimitError, None, "queue_full"),
        (
            {"extra_body": {"length_penalty": 2.0}},
            openai.BadRequestError,
            "length_penalty",
            "unsupported_parameter",
        ),
    ],
)
def test_errors(openai_client, engine, fields, error, param, code):
    engine.max_requests = 2
    with pytest.raises(error) as caught:
        openai_client.chat.completions.create(**{"model": "tiny/model", "messages": HI, **fields})
    assert (caught.value.param, caught.value.code) == (param, code)


def test_error_in_mid_stream(openai_client, engine):
    engine.script = lambda request: [
        *words("a", finish=None),
        Step("", (), FinishReason.ERROR, error="It broke."),
    ]
    stream = openai_client.chat.completions.create(model="tiny/model", messages=HI, stream=True)
    texts: list[str] = []
    with pytest.raises(openai.APIError, match=r"It broke\."):
        texts.extend(chunk.choices[0].delta.content for chunk in stream)
    assert engine.num_requests == 0


def test_client_that_stops_reading_aborts_its_request(openai_client, engine):
    engine.hold_after = 1
    stream = openai_client.completions.create(model="tiny/model", prompt="a", stream=True)
    assert next(stream).choices[0].text == "Hello"
    stream.close()
    from tests.server.live_server import wait_until

    wait_until(lambda: engine.num_requests == 0)
    assert len(engine.aborted) == 1
