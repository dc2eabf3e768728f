"""/v1/responses by the openai package and /v1/messages by anthropic's, on a tiny real model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.e2e.served import Served

pytestmark = pytest.mark.slow

USER: Any = {"role": "user", "content": "the cat eats"}
SYSTEM = "the old man sells 12 boxes."
CHAT: Any = {
    "model": "tiny",
    "messages": [{"role": "system", "content": SYSTEM}, USER],
    "temperature": 0,
    "max_tokens": 40,
}

GREEDY = {"temperature": 0}
"""Newer releases of the anthropic package have no argument for it."""


@pytest.fixture
def claude(server: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def answer(client: openai.OpenAI) -> str:
    text = client.chat.completions.create(**CHAT).choices[0].message.content
    assert text
    return text


def test_response_whole_and_streamed(client: openai.OpenAI, answer: str) -> None:
    fields: dict[str, Any] = {
        "model": "tiny",
        "instructions": SYSTEM,
        "input": USER["content"],
        "temperature": 0,
        "extra_body": {"stop": answer[20:24]},
    }
    whole = client.responses.create(**fields)
    with client.responses.stream(**fields) as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert whole.output_text == final.output_text == text == answer[: answer.index(answer[20:24])]
    assert whole.status == final.status == "completed"
    assert whole.usage.output_tokens == final.usage.output_tokens > 3


def test_response_cut_off_by_the_limit(client: openai.OpenAI, answer: str) -> None:
    whole = client.responses.create(
        model="tiny", instructions=SYSTEM, input=USER["content"], temperature=0,
        max_output_tokens=40,
    )  # fmt: skip
    assert whole.output_text == answer
    assert whole.status == "incomplete"
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage.output_tokens == 40


def test_conversation_over_several_responses(client: openai.OpenAI) -> None:
    first = client.responses.create(model="tiny", input="the cat eats", max_output_tokens=10)
    fields: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_output_tokens": 20}
    by_id = client.responses.create(input="nobody likes", previous_response_id=first.id, **fields)
    conversation: Any = [
        USER,
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "nobody likes"},
    ]
    in_full = client.responses.create(input=conversation, **fields)
    assert by_id.output_text == in_full.output_text
    assert by_id.usage.input_tokens == in_full.usage.input_tokens
    assert client.responses.retrieve(by_id.id).output_text == by_id.output_text


def test_message_whole_and_streamed(claude: anthropic.Anthropic, answer: str) -> None:
    fields: dict[str, Any] = {
        "model": "tiny",
        "system": SYSTEM,
        "messages": [USER],
        "extra_body": GREEDY,
        "max_tokens": 40,
    }
    whole = claude.messages.create(**fields)
    with claude.messages.stream(**fields) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert whole.content[0].text == final.content[0].text == text == answer
    assert whole.stop_reason == final.stop_reason == "max_tokens"
    assert whole.usage.output_tokens == final.usage.output_tokens == 40
    counted = claude.messages.count_tokens(model="tiny", system=SYSTEM, messages=[USER])
    for message in (whole, final):
        usage = message.usage
        assert usage.cache_read_input_tokens is not None
        assert usage.input_tokens + usage.cache_read_input_tokens == counted.input_tokens


def test_message_with_a_stop_sequence(claude: anthropic.Anthropic, answer: str) -> None:
    stop = answer[10:14]
    message = claude.messages.create(
        model="tiny", system=SYSTEM, messages=[USER], max_tokens=40,
        stop_sequences=[stop], extra_body=GREEDY,
    )  # fmt: skip
    assert message.content[0].text == answer[: answer.index(stop)]
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)


def test_begun_answer_is_continued(
    claude: anthropic.Anthropic, client: openai.OpenAI, answer: str
) -> None:
    begun = answer[: answer.index(".") + 1]
    message = claude.messages.create(
        model="tiny", system=SYSTEM, max_tokens=20, extra_body=GREEDY,
        messages=[USER, {"role": "assistant", "content": begun}],
    )  # fmt: skip
    chat = client.chat.completions.create(
        **{
            **CHAT,
            "max_tokens": 20,
            "messages": [*CHAT["messages"], {"role": "assistant", "content": begun}],
        },
        extra_body={"continue_final_message": True},
    )
    assert message.content[0].text == chat.choices[0].message.content
    assert len(message.content[0].text) > 30
    assert answer.startswith(begun + message.content[0].text[:30])


def test_tools_are_refused_by_a_model_that_has_none(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="no place for tools"):
        claude.messages.create(
            model="tiny", messages=[USER], max_tokens=5,
            tools=[{"name": "f", "input_schema": {"type": "object"}}],
        )  # fmt: skip


def test_tokens_of_a_chat_are_those_it_is_charged_for(
    server: Served, client: openai.OpenAI
) -> None:
    body = {"model": "tiny", "messages": CHAT["messages"]}
    tokens = httpx.post(f"{server.url}/tokenize", json=body, timeout=60).json()["tokens"]
    usage = client.chat.completions.create(**CHAT).usage
    assert len(tokens) == usage.prompt_tokens
    text = httpx.post(f"{server.url}/detokenize", json={"tokens": tokens}, timeout=60).json()
    assert text["prompt"].startswith("<|im_start|>system\n")


def test_best_of_is_among_its_candidates(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "model": "tiny", "prompt": "the cat", "max_tokens": 12, "temperature": 1.5, "seed": 3,
        "logprobs": 0,
    }  # fmt: skip
    candidates = client.completions.create(n=4, **fields).choices
    best = client.completions.create(n=1, best_of=4, **fields)
    means = {c.text: sum(c.logprobs.token_logprobs) / len(c.logprobs.tokens) for c in candidates}
    assert best.choices[0].text == max(means, key=means.__getitem__)
    assert best.usage.completion_tokens == 48
