"""What clients send back of earlier turns: cut-off calls, refusals, calls in the old form."""

from __future__ import annotations

from typing import Any

import pytest

from engine.request import ChatOptions, FinishReason
from engine.text.chat_template import ChatTemplate
from tests.server.scripted_engine import words
from tests.tiny_models import make_tokenizer

HI = {"role": "user", "content": "Hi"}
NOT_OBJECTS = ['{"a":', '{"city": "Ro', "[1]", "5", '"x"', "NaN", '{"a": NaN}', "Rome"]
"""Arguments of calls."""

TEMPLATES = [
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for call in m.tool_calls or [] %}"
    + arguments
    + "{% endfor %}{% endfor %}"
    for arguments in (
        "{{ call.function.arguments | tojson }}",
        "{% for name, value in call.function.arguments.items() %}{{ name }}={{ value }}"
        "{% endfor %}",
    )
]


def call_of(arguments):
    return {"id": "c1", "function": {"name": "f", "arguments": arguments}}


def chat_history(arguments):
    answer = {"role": "assistant", "content": None, "tool_calls": [call_of(arguments)]}
    return [HI, answer, {"role": "tool", "tool_call_id": "c1", "content": "error"}, HI]


def response_history(arguments):
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": arguments}
    output = {"type": "function_call_output", "call_id": "c1", "output": "error"}
    return [HI, call, output, HI]


@pytest.fixture(scope="module")
def templates():
    made = []
    for source in TEMPLATES:
        tokenizer = make_tokenizer("byte_level", 300)
        tokenizer.chat_template = source
        made.append(ChatTemplate(tokenizer, []))
    return made


@pytest.mark.parametrize("arguments", [*NOT_OBJECTS, "[" * 999])
async def test_arguments_that_are_no_object_stand_as_text(client, engine, templates, arguments):
    engine.max_context = 2000
    response = await client.chat(messages=chat_history(arguments))
    assert response.status_code == 200, response.text
    body = {"model": "tiny/model", "input": response_history(arguments)}
    response = await client.http.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text
    for request in engine.submitted:
        assert request.source.messages[1] == {
            "role": "assistant",
            "content": f'{{"name": "f", "arguments": {arguments}',
        }
        for template in templates:
            parts = template.parts(request.source.messages, ChatOptions())
            assert arguments in "".join(part.text for part in parts)


async def test_whole_calls_beside_a_cut_off_one_stay_calls(client, engine):
    calls = [call_of('{"a": 1}'), call_of('{"a":')]
    messages = [HI, {"role": "assistant", "content": "So:", "tool_calls": calls}, HI]
    assert (await client.chat(messages=messages)).status_code == 200
    answer = engine.submitted[0].source.messages[1]
    assert answer["content"] == 'So:\n{"name": "f", "arguments": {"a":'
    assert [call["function"]["arguments"] for call in answer["tool_calls"]] == [{"a": 1}]


async def test_kept_response_with_a_cut_off_call_can_be_continued(client, engine):
    engine.script = lambda request: words(
        '<tool_call>{"name": "f", "arguments": {"a":', finish=FinishReason.LENGTH
    )
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    body = {"model": "tiny/model", "input": "Hi", "tools": [tool]}
    first = (await client.http.post("/v1/responses", json=body)).json()
    assert first["output"][0]["arguments"] == '{"a":'
    body["previous_response_id"] = first["id"]
    assert (await client.http.post("/v1/responses", json=body)).status_code == 200
    assert engine.submitted[1].source.messages[1]["content"].endswith('"arguments": {"a":')


@pytest.mark.parametrize("content", [None, "", []])
async def test_calls_without_content(client, engine, content):
    question, answer, *rest = chat_history('{"a": 1}')
    response = await client.chat(messages=[question, {**answer, "content": content}, *rest])
    assert response.status_code == 200, response.text
    said = engine.submitted[0].source.messages[1]
    assert not said["content"]
    assert [call["function"]["arguments"] for call in said["tool_calls"]] == [{"a": 1}]


@pytest.mark.parametrize(
    "answer",
    [
        {"role": "assistant", "content": None, "refusal": "I can't."},
        {"role": "assistant", "refusal": "I can't."},
        {"role": "assistant", "content": "I can't.", "refusal": None},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "I can't."}]},
    ],
)
async def test_refusals_are_text(client, engine, answer):
    response = await client.chat(messages=[HI, answer, HI])
    assert response.status_code == 200, response.text
    said = {"role": "assistant", "content": "I can't."}
    assert engine.submitted[0].source.messages[1] == said
    if isinstance(answer.get("content"), list):
        body = {"model": "tiny/model", "input": [HI, answer, HI]}
        assert (await client.http.post("/v1/responses", json=body)).status_code == 200
        assert engine.submitted[1].source.messages[1] == said


IMAGES: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}},
        {"type": "input_audio", "input_audio": {}},
        {"type": "file", "file": {}},
    ],
    "/v1/responses": [
        {"type": "input_image", "image_url": "data:image/png;base64,AA"},
        {"type": "input_file", "file_id": "x"},
    ],
    "/v1/messages": [
        {"type": "image", "source": {"type": "url", "url": "x"}},
        {"type": "document", "source": {}},
        {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image", "source": {}}]},
    ],
}


@pytest.mark.parametrize(("path", "part"), [(path, p) for path, ps in IMAGES.items() for p in ps])
async def test_what_is_no_text_is_refused_as_such(client, path, part):
    message = {"role": "user", "content": [{"type": "text", "text": "See:"}, part]}
    if path == "/v1/responses":
        body: dict[str, Any] = {"input": [{**message, "content": [part]}]}
    else:
        body = {"messages": [message], "max_tokens": 9}
    response = await client.http.post(path, json={"model": "tiny/model", **body})
    assert response.status_code == 400
    error = response.json()["error"]["message"]
    media = {"input_audio": "audio", "file": "files", "input_file": "files"}
    media["document"] = "documents"
    assert f"this model takes no {media.get(part['type'], 'images')}, only text" in error
    assert ".content." in error


@pytest.mark.parametrize("kind", [[], {}, 5, None])
async def test_parts_of_no_type(client, kind):
    response = await client.chat(messages=[{"role": "user", "content": [{"type": kind}]}])
    assert response.status_code == 400
