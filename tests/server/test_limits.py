"""Every limit of `limits.*`: what is just over it is refused, what is just at it is not."""

from __future__ import annotations

import importlib
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from engine.config import Config, LimitsConfig
from server.app import create_app
from server.limits import is_deeper
from tests.server.live_server import live_server
from tests.server.scripted_engine import ScriptedEngine

LIMITS = {
    "max_body_bytes": 8192,
    "max_headers": 20,
    "max_header_bytes": 4096,
    "header_timeout": 20.0,
    "body_timeout": 20.0,
    "max_prompts": 4,
    "max_choices": 3,
    "max_logprobs": 3,
    "max_stops": 2,
    "max_stop_length": 10,
    "max_tools": 3,
    "max_schema_bytes": 2048,
    "max_schema_depth": 6,
    "max_guided_choices": 5,
    "max_schema_seconds": 1.0,
}


@pytest.fixture
def config() -> Config:
    return Config(limits=LIMITS)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    config = Config(limits=LIMITS)
    with live_server(create_app(ScriptedEngine(), config), config) as url:
        yield url


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels - 1):
        schema = {"items": schema}
    return schema


def tools(count: int, levels: int = 2) -> list[dict[str, Any]]:
    functions = [{"name": f"f{n}", "parameters": nested(levels)} for n in range(count)]
    return [{"type": "function", "function": function} for function in functions]


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}


def sized(size: int) -> dict[str, Any]:
    """A schema of so many bytes without white space."""
    return {"const": "x" * (size - len('{"const":""}'))}


def sized_tools(size: int) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "big", "parameters": sized(size)}}]


OVER_AND_AT = [
    ("max_prompts", "complete", {"prompt": ["a"] * 5}, {"prompt": ["a"] * 4}, "prompt"),
    ("max_choices", "complete", {"n": 4}, {"n": 3}, "n"),
    ("max_choices", "complete", {"n": 2**40}, {"n": 1}, "n"),
    ("max_choices", "chat", {"n": 4}, {"n": 3}, "n"),
    ("max_choices", "complete", {"best_of": 4}, {"best_of": 3}, "best_of"),
    ("max_logprobs", "complete", {"logprobs": 4}, {"logprobs": 3}, "logprobs"),
    (
        "max_logprobs",
        "chat",
        {"logprobs": True, "top_logprobs": 4},
        {"logprobs": True, "top_logprobs": 3},
        "top_logprobs",
    ),
    ("max_stops", "complete", {"stop": ["a"] * 3}, {"stop": ["x"] * 2}, "stop"),
    ("max_stop_length", "complete", {"stop": "x" * 11}, {"stop": "x" * 10}, "stop"),
    ("max_stop_length", "chat", {"stop": ["a", "x" * 11]}, {"stop": ["a", "x" * 10]}, "stop"),
    ("max_tools", "chat", {"tools": tools(4)}, {"tools": tools(3)}, "tools"),
    (
        "max_schema_depth",
        "chat",
        {"tools": tools(1, levels=7)},
        {"tools": tools(1, levels=6)},
        "tools.0.function.parameters",
    ),
    (
        "max_schema_depth",
        "chat",
        {"response_format": schema_format(nested(7))},
        {"response_format": schema_format(nested(6))},
        "response_format.json_schema.schema",
    ),
    (
        "max_schema_depth",
        "complete",
        {"guided_json": json.dumps(nested(7))},
        {"guided_json": json.dumps(nested(6))},
        "guided_json",
    ),
    (
        "max_schema_depth",
        "complete",
        {"structured_outputs": {"json": {"enum": [[[[[[1]]]]]]}}},
        {"structured_outputs": {"json": {"enum": [[[[[1]]]]]}}},
        "structured_outputs.json",
    ),
    (
        "max_schema_bytes",
        "complete",
        {"guided_regex": "x" * 2049},
        {"guided_regex": "x" * 2048},
        "guided_regex",
    ),
    (
        "max_schema_bytes",
        "chat",
        {"tools": [*tools(1), *sized_tools(2049)]},
        {"tools": [*tools(1), *sized_tools(2048)]},
        "tools.1.function.parameters",
    ),
    (
        "max_schema_bytes",
        "chat",
        {"tools": [*sized_tools(2040), *tools(2)], "tool_choice": "required"},
        {"tools": [*sized_tools(1900), *tools(2)], "tool_choice": "required"},
        "tools",
    ),
    (
        "max_schema_bytes",
        "complete",
        {"guided_json": sized(2049)},
        {"guided_json": sized(2048)},
        "guided_json",
    ),
    (
        "max_schema_bytes",
        "chat",
        {"json_schema": json.dumps({"const": "x" * 2048})},
        {"json_schema": json.dumps({"const": "x" * 2000})},
        "json_schema",
    ),
    (
        "max_guided_choices",
        "complete",
        {"guided_choice": list("abcdef")},
        {"guided_choice": list("abcde")},
        "guided_choice",
    ),
    (
        "max_guided_choices",
        "chat",
        {"structured_outputs": {"choice": list("abcdef")}},
        {"structured_outputs": {"choice": list("abcde")}},
        "structured_outputs.choice",
    ),
]


@pytest.mark.parametrize(("limit", "api", "over", "at", "param"), OVER_AND_AT)
async def test_fields(client, engine, limit, api, over, at, param):
    response = await getattr(client, api)(**over)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert f"'{param}'" in error["message"]
    assert str(LIMITS[limit]) in error["message"]
    assert engine.submitted == []
    response = await getattr(client, api)(**at)
    assert response.status_code == 200, response.text


class Endless(dict[str, Any]):
    """Nested for ever."""

    def values(self) -> list[Any]:  # type: ignore[override]
        return [Endless()]


def test_depth_is_looked_at_no_farther_than_the_limit():
    assert is_deeper(Endless(), 64)
    assert not is_deeper(nested(6), 6)
    assert is_deeper(nested(7), 6)
    assert not is_deeper(1, 0)


@pytest.mark.parametrize(
    ("check", "fields"),
    [
        ("server.apis.shared.prompt.turn.check_tools", {"tools": tools(1)}),
        ("server.apis.shared.grammar.prepare.prepare_constraint", {"guided_json": nested(2)}),
        (
            "server.apis.shared.grammar.prepare.prepared_tools",
            {"tools": tools(1), "tool_choice": "required"},
        ),
    ],
)
async def test_schemas_are_walked_off_the_event_loop(client, monkeypatch, check, fields):
    module, _, name = check.rpartition(".")
    inner = getattr(importlib.import_module(module), name)
    threads = []

    def noted(*arguments: Any) -> Any:
        threads.append(threading.current_thread())
        return inner(*arguments)

    monkeypatch.setattr(check, noted)
    response = await client.chat(**fields)
    assert response.status_code == 200, response.text
    assert threads
    assert threading.main_thread() not in threads


async def test_schema_that_is_too_deep_to_parse(client):
    client.http.headers["Content-Type"] = "application/json"
    for text in ("[" * 500, '{"a":' * 300 + "1" + "}" * 300):
        response = await client.complete(guided_json=text)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "guided_json"


def test_every_limit_is_tested():
    elsewhere = {
        "max_body_bytes",  # test_http_errors
        "max_schema_seconds",  # tests/e2e
        "max_headers",
        "max_header_bytes",
        "header_timeout",  # test_http_protocol
        "body_timeout",
    }
    assert {entry[0] for entry in OVER_AND_AT} | elsewhere == set(LimitsConfig.model_fields)
    assert set(LIMITS) == set(LimitsConfig.model_fields)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/messages", {"stop_sequences": ["a", "b", "c"]}, None),
        ("/v1/messages", {"stop_sequences": ["x" * 11]}, None),
        (
            "/v1/messages",
            {"tools": [{"name": f"f{n}", "input_schema": {}} for n in range(4)]},
            None,
        ),
        (
            "/v1/responses",
            {"tools": [{"type": "function", "name": f"f{n}"} for n in range(4)]},
            "tools",
        ),
        ("/tokenize", {"tools": tools(4)}, "tools"),
    ],
)
async def test_other_apis(client, engine, path, fields, param):
    messages = [{"role": "user", "content": "a"}]
    body = {"model": "tiny/model", "messages": messages, "max_tokens": 5, **fields}
    if path == "/v1/responses":
        body = {"model": "tiny/model", "input": "a", **fields}
    response = await client.http.post(path, json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    (name,) = fields
    assert f"'{name}'" in error["message"]
    assert "the limit is" in error["message"]
    assert error.get("param") == param
    assert engine.submitted == []


class TestHeaders:
    async def test_number(self, client):
        own = len(client.http.headers) + 1  # httpx adds Host
        headers = {f"X-H{number}": "a" for number in range(20 - own)}
        assert (await client.http.get("/health", headers=headers)).status_code == 200
        response = await client.http.get("/health", headers={**headers, "X-Over": "a"})
        assert response.status_code == 431
        error = response.json()["error"]
        assert error["code"] == "request_headers_too_large"
        assert "21 headers; the limit is 20" in error["message"]

    async def test_size(self, client):
        assert (await client.http.get("/health", headers={"X": "a" * 3000})).status_code == 200
        response = await client.http.get("/health", headers={"X": "a" * 4096})
        assert response.status_code == 431
        assert "the limit is 4096" in response.json()["error"]["message"]

    async def test_long_target(self, client):
        response = await client.http.get("/health?" + "a" * 4096)
        assert response.status_code == 431

    @pytest.mark.parametrize(
        "flood",
        [
            b"X: " + b"a" * 30_000 + b"\r\n",
            b"X: " + b"a" * 5_000_000 + b"\r\n",
            b"X: a\r\n" * 5_000,
            b"X: a\r\n" * 500_000,
            b"X: a\r\n " + b"folded\r\n " * 50_000,
            b"X" * 1_000_000 + b": a\r\n",
            b"a" * 5_000_000,
            b"\x00\xff" * 3000 + b"\r\n",
        ],
        ids=["big", "huge", "many", "flood", "folded", "name", "endless", "binary"],
    )
    @pytest.mark.parametrize("in_pieces", [False, True])
    def test_floods_over_a_socket(self, url, flood, in_pieces):
        status = send_headers(url, b"GET /v1/models HTTP/1.1\r\nHost: a\r\n" + flood, in_pieces)
        assert status in (400, 431)
        assert httpx.get(f"{url}/v1/models").status_code == 200


def send_headers(url: str, head: bytes, in_pieces: bool) -> int:
    """Status of the answer; 400 where the server closed without one it could still deliver."""
    host, port = url.removeprefix("http://").split(":")
    piece = 1000 if in_pieces else len(head) + 4
    answer = b""
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        try:
            data = head + b"\r\n\r\n"
            for start in range(0, len(data), piece):
                connection.sendall(data[start : start + piece])
            while received := connection.recv(65536):
                answer += received
                if b"\r\n\r\n" in answer:
                    break
        except (ConnectionResetError, BrokenPipeError):
            pass
    return int(answer.split(b" ", 2)[1]) if answer else 400
