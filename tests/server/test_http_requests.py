"""Forms of a request that mean the same: HEAD, spare slashes, compressed and marked bodies."""

from __future__ import annotations

import gzip
import json
import tracemalloc
import zlib

import httpx
import pytest
from prometheus_client import CollectorRegistry

from server.apis.shared.http.body_encoding import decompressed
from server.app import create_app
from server.errors import ApiError
from server.process.metrics_server import metrics_app
from tests.server.live_server import live_server
from tests.server.test_admission import KEYS, make_client
from tests.server.test_transport import ORIGIN

BODY = {"model": "tiny/model", "prompt": "Say hello"}
JSON = json.dumps(BODY).encode()


@pytest.fixture
def post(client):
    async def post(content, **headers):
        headers = {"content-type": "application/json", **headers}
        return await client.http.post("/v1/completions", content=content, headers=headers)

    return post


def error_of(response, status):
    assert response.status_code == status, response.text
    return response.json()["error"]


async def test_every_get_route_answers_head(client, app):
    paths = [
        path.replace("{model}", "tiny/model").replace("{response_id}", "none")
        for path, operations in app.openapi()["paths"].items()
        if "get" in operations
    ]
    assert {"/health", "/v1/models", "/v1/models/tiny/model", "/metrics"} <= set(paths)
    for path in [*paths, "/openapi.json", "/docs", "/v1/nothing"]:
        head, get = [await client.http.request(method, path) for method in ("HEAD", "GET")]
        assert head.status_code == get.status_code, path
        assert head.headers["content-type"] == get.headers["content-type"]
        assert head.content == b""
        if path != "/metrics":
            assert head.headers["content-length"] == str(len(get.content))


def test_head_leaves_the_connection_usable(app):
    with live_server(app) as url, httpx.Client(base_url=url) as http:
        for method, length in (("HEAD", 0), ("GET", len(b'{"status":"ok"}'))):
            response = http.request(method, "/health")
            assert response.status_code == 200
            assert len(response.content) == length
            assert response.headers["content-length"] == str(len(b'{"status":"ok"}'))


async def test_head_on_the_metrics_port():
    async with make_client(metrics_app(CollectorRegistry())) as http:
        assert (await http.head("/metrics")).status_code == 200
        assert (await http.get("http://test//metrics/")).status_code == 200


@pytest.mark.parametrize(
    "path", ["/v1/completions/", "//v1/completions", "/v1//completions", "/v1/completions//"]
)
async def test_spare_slashes_mean_nothing(client, path):
    response = await client.http.post(f"http://test{path}", json=BODY)
    assert response.json()["choices"][0]["text"] == "Hello world!"


async def test_spare_slashes_open_no_way_around_the_keys(engine, config):
    async with make_client(create_app(engine, config, keys=KEYS)) as http:
        for path in ("//v1/models", "/v1/models/", "/health/../v1/models", "//health//v1/models"):
            assert (await http.get(f"http://test{path}")).status_code in (401, 404), path
        assert (await http.get("http://test//health/")).status_code == 200


async def test_anthropics_errors_keep_their_shape_behind_spare_slashes(client):
    response = await client.http.post("http://test//v1/messages/", json={})
    assert (response.status_code, response.json()["type"]) == (400, "error")


@pytest.mark.parametrize(
    ("encoding", "content"),
    [
        ("gzip", gzip.compress(JSON)),
        ("GZip", gzip.compress(JSON)),
        ("x-gzip", gzip.compress(JSON)),
        ("gzip", gzip.compress(JSON[:9]) + gzip.compress(JSON[9:])),
        ("deflate", zlib.compress(JSON)),
        ("identity", JSON),
    ],
    ids=["gzip", "capitals", "older name", "two members", "deflate", "identity"],
)
async def test_compressed_bodies(post, engine, encoding, content):
    response = await post(content, **{"content-encoding": encoding})
    assert response.status_code == 200, response.text
    assert engine.submitted[0].source.text == "Say hello"


async def test_bomb_is_refused_at_the_limit(post, engine):
    bomb = gzip.compress(b" " * (3 << 20))
    assert len(bomb) < 4096
    error = error_of(await post(bomb, **{"content-encoding": "gzip"}), 413)
    assert (error["code"], "4096 bytes" in error["message"]) == ("request_too_large", True)
    assert engine.submitted == []


def test_bomb_is_never_unpacked():
    bomb = gzip.compress(b" " * (64 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(ApiError):
            decompressed(bomb, "gzip", 1 << 20)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("encoding", ["zstd", "br", "gzip, gzip", "x" * 500])
async def test_other_encodings_are_refused_by_name(post, encoding):
    response = await post(JSON, **{"content-encoding": encoding})
    error = error_of(response, 415)
    assert error["code"] == "unsupported_content_encoding"
    assert encoding[:64] in error["message"]
    assert "gzip and deflate" in error["message"]
    assert response.headers["accept-encoding"] == "gzip, deflate"


@pytest.mark.parametrize(
    "content",
    [JSON, gzip.compress(JSON)[:-9], gzip.compress(JSON) + b"x"],
    ids=["plain", "cut short", "with a tail"],
)
async def test_broken_compression(post, content):
    error = error_of(await post(content, **{"content-encoding": "gzip"}), 400)
    assert "not valid gzip" in error["message"]


async def test_byte_order_mark_is_passed_over(post):
    assert (await post(b"\xef\xbb\xbf" + JSON)).status_code == 200


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"])
async def test_wide_characters_are_refused_by_name(post, encoding):
    error = error_of(await post(JSON.decode().encode(encoding)), 415)
    assert "must be JSON in UTF-8, not in UTF-" in error["message"]


@pytest.mark.parametrize("keys", [None, KEYS])
async def test_preflight_is_told_the_key_of_the_configuration(engine, config, keys):
    headers = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}
    async with make_client(create_app(engine, config, keys=keys)) as http:
        response = await http.options("/v1/chat/completions", headers=headers)
        assert "'cors.allow_origins'" in error_of(response, 405)["message"]
        assert response.headers["allow"] == "POST"
        unknown = await http.options("/v1/nothing", headers=headers)
        assert unknown.status_code == (404 if keys is None else 401)
