"""/v1/models, and one model under several names."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from engine.config import Config, ConfigError, load_config
from server.app import create_app

NAMES = ("code", "org/code-1.5b")
MESSAGES = [{"role": "user", "content": "Hi"}]
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 9},
}


@pytest.fixture
async def http(engine):
    transport = httpx.ASGITransport(app=create_app(engine, Config(served_names=NAMES)))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        yield http


async def test_every_name_is_listed(http):
    models = (await http.get("/v1/models")).json()["data"]
    assert [model["id"] for model in models] == list(NAMES)
    for model in models:
        assert (await http.get(f"/v1/models/{model['id']}")).json() == model
    assert (await http.get("/v1/models/tiny/model")).status_code == 404


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("path", REQUESTS)
async def test_an_answer_has_the_name_that_was_asked_for(http, path, name):
    whole = await http.post(path, json={"model": name, **REQUESTS[path]})
    assert (whole.status_code, whole.json()["model"]) == (200, name)
    streamed = await http.post(path, json={"model": name, "stream": True, **REQUESTS[path]})
    events = [json.loads(e[6:]) for e in streamed.text.splitlines() if e.startswith("data: {")]
    named = [event.get("response") or event.get("message") or event for event in events]
    assert {event["model"] for event in named if "model" in event} == {name}


@pytest.mark.parametrize("path", REQUESTS)
async def test_other_names_are_told_the_ones_there_are(http, path):
    response = await http.post(path, json={"model": "tiny/model", **REQUESTS[path]})
    assert response.status_code == 404
    assert "this server has 'code', 'org/code-1.5b'." in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("names", "message"), [("[a, a]", "served_names: a name stands"), ("['']", "served_names.0: ")]
)
def test_unusable_names(tmp_path, names, message):
    path = tmp_path / "config.yaml"
    path.write_text(f"served_names: {names}")
    with pytest.raises(ConfigError) as raised:
        load_config(path)
    assert str(raised.value).startswith(message)
