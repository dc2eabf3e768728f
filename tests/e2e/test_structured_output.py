"""Structured output through a server process: the openai package's helpers, and what is refused."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel, Field

from tests.e2e.served import Served, served, tiny_flags

pytestmark = pytest.mark.slow

MESSAGES: Any = [{"role": "user", "content": "the cat eats"}]


class Pet(BaseModel):
    kind: Literal["cat", "dog", "fox"]
    legs: int = Field(ge=0, le=8)


class Answer(BaseModel):
    pets: list[Pet] = Field(max_length=2)
    happy: bool
    mood: Literal["calm", "wild"] | None


@pytest.fixture(scope="module")
def server(tiny_model_dir: Path, tiny_draft_dir: Path) -> Iterator[Served]:
    with served(*tiny_flags(tiny_model_dir, tiny_draft_dir)) as server:
        server.wait_until_ready()
        yield server


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("mode", ["auto", "off", "grammar", "universal"])
def test_parse_with_pydantic(client: openai.OpenAI, mode: str, temperature: float) -> None:
    fields: dict[str, Any] = {
        "model": "tiny",
        "messages": MESSAGES,
        "response_format": Answer,
        "temperature": temperature,
        "seed": 5,
        "max_completion_tokens": 200,
    }
    plain = client.chat.completions.parse(**fields, extra_body={"speculation": {"mode": "off"}})
    parsed = client.chat.completions.parse(
        **fields, n=2, extra_body={"speculation": {"mode": mode, "stats": True}}
    )
    for choice in parsed.choices:
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, Answer)
    assert parsed.choices[0].message.content == plain.choices[0].message.content
    if mode == "grammar":
        usage: Any = parsed.usage
        assert set(usage.speculation["by_drafter"]) == {"grammar"}
        assert usage.speculation["accepted_tokens"] == usage.speculation["drafted_tokens"] > 0


def test_parse_streamed(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="tiny", messages=MESSAGES, response_format=Answer, max_completion_tokens=200
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    message = final.choices[0].message
    assert "".join(deltas) == message.content
    assert isinstance(message.parsed, Answer)


def test_a_cut_answer_tells(client: openai.OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(
            model="tiny", messages=MESSAGES, response_format=Answer, max_completion_tokens=3
        )


def test_vllms_extras(client: openai.OpenAI) -> None:
    def complete(**extra: Any) -> str:
        completion = client.completions.create(
            model="tiny", prompt="the cat eats", max_tokens=60, extra_body=extra
        )
        assert completion.choices[0].finish_reason == "stop"
        return completion.choices[0].text

    assert complete(guided_choice=["green apples", "the map"]) in ("green apples", "the map")
    assert re.fullmatch(r"[a-c]{2,4}\d", complete(guided_regex=r"[a-c]{2,4}\d"))
    assert re.fullmatch(r"v\d\.\d", complete(guided_grammar='root ::= "v" [0-9] "." [0-9]'))
    assert json.loads(complete(structured_outputs={"json": {"enum": [12, "x"]}})) in (12, "x")


REFUSED = [
    {"guided_regex": "(["},
    {"guided_regex": r"(a)\1"},
    {"guided_json": {"$ref": "#"}},
    {"guided_json": {"type": "integer", "multipleOf": 999_983}},
    {"guided_grammar": 'start: %json {"type": "integer", "multipleOf": 999983}'},
    {"guided_json": {"type": "string", "pattern": "(["}},
    {"guided_json": {"enum": ["x" * 70_000]}},
    {"guided_grammar": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000},
    {"structured_outputs": {"regex": r"(\w|\p{L}){1,5000}\d(?:[^x]{3,900}y){1,90}(["}},
]


@pytest.mark.parametrize("fields", REFUSED)
def test_bad_grammars_are_refused_soon_and_the_server_goes_on(
    server: Served, client: openai.OpenAI, fields: dict[str, Any]
) -> None:
    (name,) = fields
    started = time.monotonic()
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 5, **fields}
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert time.monotonic() - started < 10
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"].startswith(name)
    assert error["type"] == "invalid_request_error"
    chat = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=2)
    assert chat.choices[0].message.content


@pytest.mark.parametrize(
    "grammar", ["start: a\na: b a\nb: /x+/", "start: /x+/ /x+/", 'root ::= "x" root']
)
def test_endless_grammars_end_with_max_tokens(
    server: Served, client: openai.OpenAI, grammar: str
) -> None:
    """The library would read ahead in them for ever."""
    completion = client.completions.create(
        model="tiny", prompt="the cat", max_tokens=20, extra_body={"guided_grammar": grammar}
    )
    assert completion.choices[0].finish_reason == "length"
    assert set(completion.choices[0].text) == {"x"}


def test_faults_are_named_with_their_place(server: Served) -> None:
    schema = {
        "$defs": {"item": {"properties": {"code": {"type": "string", "pattern": "(["}}}},
        "type": "object",
        "properties": {"items": {"type": "array", "items": {"$ref": "#/$defs/item"}}},
    }
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 5, "guided_json": schema}
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    message = response.json()["error"]["message"]
    assert "at '/$defs/item/properties/code': " in message
    assert "unclosed character class" in message


def children(process: int) -> list[int]:
    tasks = Path(f"/proc/{process}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def test_processes_for_grammars_end_with_the_server(
    tiny_model_dir: Path, tiny_draft_dir: Path
) -> None:
    with served(*tiny_flags(tiny_model_dir, tiny_draft_dir)) as server:
        server.wait_until_ready()
        body = {"model": "tiny", "prompt": "the", "guided_regex": "[ab]{3}", "max_tokens": 9}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert re.fullmatch("[ab]{3}", answer.json()["choices"][0]["text"])
        processes = children(server.process.pid)
        assert 1 <= len(processes) <= 2
    assert not any(Path(f"/proc/{process}").exists() for process in processes)
