"""The official openai package against a real server process and a tiny real model."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from transformers import AutoTokenizer

from tests.e2e.served import Served

PROMPT = "the cat eats green apples. a naïve robot"
MESSAGES: Any = [
    {"role": "system", "content": "the old man sells 12 boxes."},
    {"role": "user", "content": "the cat eats"},
]


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_completion_streamed_and_whole(client: openai.OpenAI, temperature: float) -> None:
    fields: dict[str, Any] = {
        "model": "tiny",
        "prompt": PROMPT,
        "max_tokens": 48,
        "temperature": temperature,
        "seed": 7,
        "logprobs": 2,
    }
    whole = client.completions.create(**fields)
    chunks = list(client.completions.create(**fields, stream=True))
    choice = whole.choices[0]
    assert choice.text
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
    assert chunks[-1].choices[0].finish_reason == choice.finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 48
    streamed = [t for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.tokens]
    assert choice.logprobs is not None
    assert streamed == choice.logprobs.tokens
    assert len(streamed) == 48


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_chat_streamed_and_whole(client: openai.OpenAI, temperature: float) -> None:
    fields: dict[str, Any] = {
        "model": "tiny",
        "messages": MESSAGES,
        "max_completion_tokens": 60,
        "stop": ".",
        "temperature": temperature,
        "seed": 11,
        "logprobs": True,
        "top_logprobs": 3,
    }
    whole = client.chat.completions.create(**fields)
    with client.chat.completions.stream(**fields) as stream:
        final = stream.get_final_completion()
    message = whole.choices[0].message
    assert message.role == "assistant"
    assert message.content
    assert final.choices[0].message.content == message.content
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason == "stop"
    for one, other in zip(
        whole.choices[0].logprobs.content, final.choices[0].logprobs.content, strict=True
    ):
        assert (one.token, one.bytes) == (other.token, other.bytes)
        assert len(one.top_logprobs) == 3
        assert one.logprob <= one.top_logprobs[0].logprob <= 0


def test_chat_is_a_completion_of_the_rendered_template(
    client: openai.OpenAI, tiny_model_dir: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    rendered = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    fields: dict[str, Any] = {"model": "tiny", "max_tokens": 30, "temperature": 0}
    chat = client.chat.completions.create(messages=MESSAGES, **fields)
    by_text = client.completions.create(prompt=rendered, **fields)
    ids = tokenizer.encode(rendered, add_special_tokens=False)
    by_ids = client.completions.create(prompt=ids, **fields)
    assert chat.choices[0].message.content == by_text.choices[0].text == by_ids.choices[0].text
    assert chat.usage.prompt_tokens == by_ids.usage.prompt_tokens == len(ids)


def test_choices_of_several_prompts(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "tiny", "max_tokens": 24, "temperature": 1.2, "seed": 3}
    prompts = [PROMPT, "nobody dreams of"]
    together = client.completions.create(prompt=prompts, n=3, **fields)
    texts = [choice.text for choice in together.choices]
    assert len(set(texts[:3])) == 3
    for number, prompt in enumerate(prompts):
        alone = client.completions.create(prompt=prompt, n=3, **fields)
        assert [choice.text for choice in alone.choices] == texts[3 * number : 3 * number + 3]
    stream = client.completions.create(prompt=prompts, n=3, stream=True, **fields)
    streamed = [""] * 6
    for chunk in stream:
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts


def test_scoring_a_prompt(client: openai.OpenAI, tiny_model_dir: Path) -> None:
    scored = client.completions.create(
        model="tiny", prompt=PROMPT, echo=True, max_tokens=0, logprobs=1
    )
    choice = scored.choices[0]
    assert choice.text == PROMPT
    assert "".join(choice.logprobs.tokens) == PROMPT
    for token, offset in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True):
        assert PROMPT[offset:].startswith(token)
    logprobs: Any = choice.logprobs.token_logprobs
    first, *others = logprobs
    assert first is None
    assert all(logprob <= 0 for logprob in others)


def test_stop_string(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 60, "temperature": 0}
    text = client.completions.create(**fields).choices[0].text
    stop = text[20:26]
    stopped = client.completions.create(**fields, stop=[stop, "never"]).choices[0]
    assert stopped.text == text[: text.index(stop)]
    assert stopped.finish_reason == "stop"
    chunks = client.completions.create(**fields, stop=stop, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == stopped.text


def test_usage_counts_cached_prompt_tokens(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "tiny", "prompt": PROMPT * 12, "max_tokens": 4}
    first = client.completions.create(**fields).usage
    *_, last = client.completions.create(
        **fields, stream=True, stream_options={"include_usage": True}
    )
    assert last.choices == []
    assert last.usage.prompt_tokens == first.prompt_tokens
    assert 0 < last.usage.prompt_tokens_details.cached_tokens < first.prompt_tokens


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        ({"model": "other"}, openai.NotFoundError, "model"),
        ({"prompt": ""}, openai.BadRequestError, "prompt"),
        ({"prompt": [10**6]}, openai.BadRequestError, "prompt"),
        ({"prompt": "the cat " * 600}, openai.BadRequestError, "prompt"),
        ({"max_tokens": 10**6}, openai.BadRequestError, "max_tokens"),
        ({"logit_bias": {"100000": 1}}, openai.BadRequestError, "logit_bias"),
        ({"stop": [""]}, openai.BadRequestError, "stop.0"),
        (
            {"extra_body": {"stop_token_ids": [100000], "min_tokens": 1}},
            openai.BadRequestError,
            "stop_token_ids",
        ),
    ],
)
def test_errors_leave_the_server_well(
    client: openai.OpenAI, fields: dict[str, Any], error: type[openai.APIStatusError], param: str
) -> None:
    with pytest.raises(error) as caught:
        client.completions.create(**{"model": "tiny", "prompt": PROMPT, **fields})
    assert caught.value.param == param
    assert client.completions.create(model="tiny", prompt=PROMPT).choices[0].finish_reason


async def test_concurrent_async_streams_get_their_own_answers(server: Served) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0
    ) as client:

        async def ask(seed: int) -> str:
            stream = await client.chat.completions.create(
                model="tiny",
                messages=MESSAGES,
                max_tokens=10 + 5 * seed,
                seed=seed,
                temperature=1.0,
                stream=True,
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        alone = [await ask(seed) for seed in range(6)]
        assert await asyncio.gather(*map(ask, range(6))) == alone
    assert len(set(alone)) == 6


def test_client_that_goes_away_frees_its_blocks(server: Served, client: openai.OpenAI) -> None:
    streams = [
        client.completions.create(
            model="tiny",
            prompt=PROMPT,
            n=4,
            max_tokens=480,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        for _ in range(4)
    ]
    for stream in streams:
        next(stream)
        stream.close()
    deadline = time.monotonic() + 10
    while server.metric("slipstream_num_requests_running") > 0:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert server.metric("slipstream_kv_cache_usage_perc") == 0
    assert server.metric("slipstream_num_requests_waiting") == 0
    assert client.completions.create(model="tiny", prompt=PROMPT).choices[0].text


def test_speculation_took_place(server: Served) -> None:
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    for drafter in ("universal", "ngram"):
        name = f'slipstream_spec_decode_num_drafts_total{{drafter="{drafter}"}}'
        assert f"{name} " in text
    assert server.metric("slipstream_target_passes_total") < server.metric(
        "slipstream_generation_tokens_total"
    )
