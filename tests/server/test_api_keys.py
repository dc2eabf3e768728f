"""API keys: what is behind them, and that there is no way round."""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from engine.config import Config, ConfigError
from server.app import create_app
from server.cli import serve
from server.cli.main import main
from server.middleware.api_keys import ApiKeys, load_api_keys
from server.middleware.auth import ApiKeyMiddleware
from tests.server.live_server import live_server
from tests.server.scripted_engine import ScriptedEngine

ALICE, BOB = "sk-alice-1234567890", "sk-bob-0987654321"
COMPLETION = {"model": "tiny/model", "prompt": "a"}


@pytest.fixture
def keys(tmp_path) -> ApiKeys:
    path = tmp_path / "keys"
    path.write_text(f"# who may come in\nalice:{ALICE}\n\n{BOB}\n")
    return load_api_keys(path, "")


@pytest.fixture
def app(engine, config, keys):
    return create_app(engine, config, keys=keys)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    digest = hashlib.sha256(ALICE.encode()).digest()
    app = create_app(ScriptedEngine(), Config(), keys=ApiKeys({digest: "alice"}))
    with live_server(app) as url:
        yield url


class TestSources:
    @pytest.fixture(autouse=True)
    def _logging_is_left_alone(self, monkeypatch):
        monkeypatch.setattr(serve, "configure_logging", lambda *arguments: None)

    def test_file_and_environment_add_up(self, tmp_path):
        path = tmp_path / "keys"
        path.write_text("team:k1\nteam:k2\n  k3  \n")
        keys = load_api_keys(path, " k4, k5 ")
        assert len(keys) == 5
        assert [keys.client_of(key) for key in (b"k1", b"k2")] == ["team", "team"]
        for key in (b"k3", b"k4", b"k5"):
            assert keys.client_of(key) == f"key-{hashlib.sha256(key).hexdigest()[:8]}"
        for wrong in (b"", b"k", b"k11", b"K1", b"team:k1", b"k1 ", b"\xff"):
            assert keys.client_of(wrong) is None

    def test_no_source_is_no_key(self):
        assert len(load_api_keys(None, "")) == 0

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "api_keys_file: {path}: no key in it"),
            ("# none\n\n", "api_keys_file: {path}: no key in it"),
            ("ab\nc d\n", "api_keys_file: {path}: line 2: a key is visible ASCII without spaces"),
            ("schlüssel\n", "api_keys_file: {path}: line 1: a key is visible ASCII without spaces"),
            ("k\na:k\n", "api_keys_file: {path}: line 2: this key was given before"),
        ],
    )
    def test_bad_files(self, tmp_path, text, message):
        path = tmp_path / "keys"
        path.write_text(text)
        with pytest.raises(ConfigError) as raised:
            load_api_keys(path, "")
        assert str(raised.value) == message.format(path=path)

    def test_bad_environment(self):
        with pytest.raises(ConfigError, match=r"^SLIPSTREAM_API_KEY: no key in it$"):
            load_api_keys(None, " , ")
        with pytest.raises(ConfigError, match=r"^SLIPSTREAM_API_KEY: key 2: this key was given"):
            load_api_keys(None, "a,a")

    def test_unreadable_file_is_one_line(self, tmp_path, capsys):
        path = tmp_path / "nowhere"
        assert main(["serve", "--api-keys-file", str(path)]) == 1
        assert capsys.readouterr().err == (
            f"slipstream: error: api_keys_file: can't read {path}: No such file or directory\n"
        )

    def test_binary_file_is_one_line(self, tmp_path, capsys):
        path = tmp_path / "keys"
        path.write_bytes(b"\xff\xfe\x00")
        assert main(["serve", "--api-keys-file", str(path)]) == 2
        assert (
            capsys.readouterr().err
            == f"slipstream: error: api_keys_file: {path}: not a text file\n"
        )

    def test_keys_leave_the_environment_and_no_error_shows_them(self, monkeypatch, capsys):
        monkeypatch.setenv("SLIPSTREAM_API_KEY", "sk-secret,sk-secret")
        assert main(["serve"]) == 2
        assert "sk-secret" not in capsys.readouterr().err
        assert "SLIPSTREAM_API_KEY" not in os.environ


class TestComparison:
    @pytest.mark.parametrize("key", [ALICE, BOB, "sk-wrong", ALICE[:-1], ""])
    def test_every_digest_is_compared_whatever_the_key(self, keys, monkeypatch, key):
        compared = []

        def compare(known, given):
            compared.append((known, given))
            return compare_digest(known, given)

        compare_digest = hmac.compare_digest
        monkeypatch.setattr(hmac, "compare_digest", compare)
        found = keys.client_of(key.encode())
        digests = [hashlib.sha256(known.encode()).digest() for known in (ALICE, BOB)]
        given = hashlib.sha256(key.encode()).digest()
        assert compared == [(digest, given) for digest in digests]
        assert (found is not None) == (key in (ALICE, BOB))

    def test_no_key_is_kept(self, keys):
        held = repr(vars(keys))
        assert ALICE not in held
        assert BOB not in held


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": f"Bearer {ALICE}"},
        {"Authorization": f"bearer {ALICE}"},
        {"Authorization": f"BEARER   {ALICE} "},
        {"Authorization": ALICE},
        {"x-api-key": ALICE},
        {"X-API-Key": BOB, "Authorization": "Bearer of-some-proxy"},
    ],
)
async def test_ways_to_send_the_key(client, headers):
    response = await client.http.post("/v1/completions", json=COMPLETION, headers=headers)
    assert response.status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": ""},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer "},
        {"Authorization": f"Basic {ALICE}"},
        {"Authorization": f"Bearer {ALICE}x"},
        {"Authorization": f"Bearer {ALICE[:-1]}"},
        {"Authorization": f"Bearer Bearer {ALICE}"},
        {"Authorization": f"Bearer {ALICE.upper()}"},
        {"Authorization": f"Bearer {ALICE},{BOB}"},
        {"Authorization": f"Bearer alice:{ALICE}"},
        {"Authorization": "Bearer alice"},
        {"Proxy-Authorization": f"Bearer {ALICE}"},
        {"Cookie": f"api_key={ALICE}"},
        {"x-api-key": ""},
    ],
)
async def test_refusals(client, engine, headers):
    response = await client.http.post("/v1/completions", json=COMPLETION, headers=headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.headers["x-request-id"]
    error = response.json()["error"]
    assert (error["type"], error["param"], error["code"]) == (
        "invalid_request_error",
        None,
        "invalid_api_key",
    )
    assert ALICE not in response.text
    assert engine.submitted == []


async def test_query_is_no_place_for_a_key(client):
    response = await client.http.get(f"/v1/models?api_key={ALICE}&key={ALICE}")
    assert response.status_code == 401


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_anthropics_shape(client, path):
    response = await client.http.post(path, json={})
    assert response.status_code == 401
    body = response.json()
    assert body["type"] == "error"
    assert body["error"]["type"] == "authentication_error"


async def test_everything_but_health_is_behind_the_keys(app, client):
    document = app.openapi()
    operations = [(method, path) for path, item in document["paths"].items() for method in item]
    assert ("post", "/v1/chat/completions") in operations
    assert ("get", "/metrics") in operations
    operations += [("get", path) for path in ("/docs", "/redoc", "/openapi.json", "/", "/nowhere")]
    operations += [(method, "/v1/completions") for method in ("options", "put", "trace", "purge")]
    for method, path in operations:
        response = await client.http.request(method.upper(), path.replace("{", "").replace("}", ""))
        assert response.status_code == (200 if path == "/health" else 401), (method, path)


async def test_huge_body_without_a_key_is_not_read(client):
    async def chunks():
        yield b" "
        raise AssertionError("the body was read")

    response = await client.http.post("/v1/completions", content=chunks())
    assert response.status_code == 401


async def test_websocket_without_a_key_is_closed(keys):
    async def app(scope, receive, send):
        raise AssertionError("it was let through")

    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": "websocket", "path": "/health", "headers": []}
    await ApiKeyMiddleware(app, keys)(scope, None, send)
    assert sent == [{"type": "websocket.close", "code": 1008}]


def raw_status(url: str, target: str, *headers: str) -> int:
    """Status of a request whose request line and headers are sent just as given."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        lines = [f"GET {target} HTTP/1.1", *headers, "Connection: close", "", ""]
        connection.sendall("\r\n".join(lines).encode("latin-1"))
        answer = b""
        while data := connection.recv(65536):
            answer += data
    assert b"max_model_len" not in answer
    return int(answer.split(b" ", 2)[1])


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1/health",
        "127.0.0.1/health?",
        "127.0.0.1/health#",
        "x/health?a=",
        "/health",
        "health",
        "a@b/health",
        "127.0.0.1:80/health?",
        "\\health",
        "[::1]/health",
    ],
)
def test_host_header_tricks(url, host):
    """A check of the URL that is put together from the Host header could be talked round."""
    assert raw_status(url, "/v1/models", f"Host: {host}") in (400, 401)
    assert raw_status(url, "/v1/models", "Host: a", f"Host: {host}") in (400, 401)


@pytest.mark.parametrize(
    "header",
    [
        "X-Forwarded-Host: 127.0.0.1/health",
        "X-Forwarded-For: 127.0.0.1",
        "X-Forwarded-Prefix: /health",
        "X-Forwarded-Path: /health",
        "X-Original-URL: /health",
        "X-Rewrite-URL: /health",
        "X-HTTP-Method-Override: OPTIONS",
        "Forwarded: for=127.0.0.1;host=/health",
        "Upgrade: websocket\r\nConnection: Upgrade",
        "Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABkAAQAAP__",
    ],
)
def test_forwarding_header_tricks(url, header):
    assert raw_status(url, "/v1/models", "Host: a", header) == 401


@pytest.mark.parametrize(
    "target",
    [
        "/v1/models/",
        "//v1/models",
        "/v1//models",
        "/V1/models",
        "/v1/models?x=/health",
        "/v1/models#/health",
        "/v1/models;/health",
        "/v1/%6dodels",
        "/%76%31/models",
        "/v1%2fmodels",
        "/health/../v1/models",
        "/health/%2e%2e/v1/models",
        "/health/%2e%2e%2fv1%2fmodels",
        "/health%2f..%2fv1/models",
        "/./v1/models",
        "/%2e/v1/models",
        "/health//v1/models",
        "/health/..//v1/models",
        "/HEALTH",
        "/health%00",
        "/health%20",
        "/health;/../v1/models",
        "/metrics",
        "http://127.0.0.1/v1/models",
        "http://127.0.0.1/health",
        "http://x/health/../v1/models",
        "health",
        "*",
    ],
)
def test_target_tricks(url, target):
    assert raw_status(url, target, "Host: a") in (400, 401)


def test_health_is_open_and_only_as_the_router_sees_it(url):
    assert raw_status(url, "/health", "Host: a") == 200
    assert raw_status(url, "/health?x=1", "Host: /v1/models") == 200
    assert raw_status(url, "/%68ealth", "Host: a") == 200  # the router decodes it too
    assert raw_status(url, "//health/", "Host: a") == 200  # spare slashes are taken out for both
    assert raw_status(url, "/health", "Host: a", "Authorization: Bearer wrong") == 200


async def test_clients_have_responses_of_their_own(client):
    made = await client.http.post(
        "/v1/responses",
        json={"model": "tiny/model", "input": "a"},
        headers={"Authorization": f"Bearer {ALICE}"},
    )
    place = f"/v1/responses/{made.json()['id']}"
    for method in ("GET", "DELETE"):
        answer = await client.http.request(method, place, headers={"x-api-key": BOB})
        assert answer.status_code == 404
    previous = {"model": "tiny/model", "input": "b", "previous_response_id": made.json()["id"]}
    answer = await client.http.post("/v1/responses", json=previous, headers={"x-api-key": BOB})
    assert answer.status_code == 404
    assert (await client.http.get(place, headers={"x-api-key": ALICE})).status_code == 200


def test_openai_and_anthropic_clients(url):
    import anthropic
    import openai

    with openai.OpenAI(base_url=f"{url}/v1", api_key=ALICE, max_retries=0) as good:
        assert good.models.list().data[0].id == "tiny/model"
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key="sk-wrong", max_retries=0) as wrong,
        pytest.raises(openai.AuthenticationError, match="not valid"),
    ):
        wrong.models.list()
    message: dict[str, Any] = {
        "model": "tiny/model",
        "max_tokens": 5,
        "messages": [{"role": "user", "content": "a"}],
    }
    with anthropic.Anthropic(base_url=url, api_key=ALICE, max_retries=0) as good:
        assert good.messages.create(**message).content
    with (
        anthropic.Anthropic(base_url=url, api_key="sk-wrong", max_retries=0) as wrong,
        pytest.raises(anthropic.AuthenticationError, match="not valid"),
    ):
        wrong.messages.create(**message)


def test_without_keys_the_server_is_open():
    with live_server(create_app(ScriptedEngine(), Config())) as url:
        assert httpx.get(f"{url}/v1/models").status_code == 200
