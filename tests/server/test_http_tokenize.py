"""/tokenize, /detokenize and /version."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from tests.server.scripted_engine import BOS, EOS

HI = {"role": "user", "content": "Hi"}


@pytest.fixture
def post(client):
    async def post(path, **body):
        return await client.http.post(path, json=body)

    return post


async def test_prompt(post, engine):
    engine.tokenizer.adds_bos = True
    body = (await post("/tokenize", model="tiny/model", prompt="né")).json()
    tokens = [BOS, 110, 0xC3, 0xA9]
    assert body == {"count": 4, "max_model_len": 128, "tokens": tokens, "token_strs": None}
    body = (
        await post("/tokenize", prompt="né", add_special_tokens=False, return_token_strs=True)
    ).json()
    assert body["tokens"] == tokens[1:]
    assert body["token_strs"] == ["n", "bytes:\\xc3", "bytes:\\xa9"]
    assert (await post("/tokenize", prompt="")).json()["tokens"] == [BOS]


async def test_messages_are_those_of_chat(post, client, engine):
    body = (await post("/tokenize", messages=[HI])).json()
    await client.chat(messages=[HI])
    assert tuple(body["tokens"]) == engine.submitted[0].prompt_token_ids


@pytest.mark.parametrize(
    ("tokens", "text"), [([110, 0xC3, 0xA9, EOS], "né<eos>"), ([], ""), ([0xC3], "\ufffd")]
)
async def test_detokenize(post, tokens, text):
    assert (await post("/detokenize", tokens=tokens)).json() == {"prompt": text}


TOKENIZE = [
    ({}, "prompt"),
    ({"prompt": "a", "messages": [HI]}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": ["a"]}, "prompt"),
    ({"prompt": "a", "model": 5}, "model"),
    ({"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
    ({"prompt": "a", "return_token_strs": "yes"}, "return_token_strs"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [HI], "tools": [{}]}, "tools.0.type"),
    ({"messages": [HI], "continue_final_message": True}, "continue_final_message"),
    ({"messages": [HI], "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs.x"),
]
DETOKENIZE = [
    ({}, "tokens"),
    ({"tokens": None}, "tokens"),
    ({"tokens": "a"}, "tokens"),
    ({"tokens": [-1]}, "tokens.0"),
    ({"tokens": [1.5]}, "tokens.0"),
    ({"tokens": [258]}, "tokens"),
    ({"tokens": [10**30]}, "tokens"),
]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [("/tokenize", *case) for case in TOKENIZE] + [("/detokenize", *case) for case in DETOKENIZE],
)
async def test_invalid_input(post, path, body, param):
    response = await post(path, **body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_unknown_model(post, path):
    assert (await post(path, model="x", prompt="a", tokens=[1])).status_code == 404


async def test_version_is_the_packages(client):
    assert (await client.http.get("/version")).json() == {"version": version("slipstream")}
