"""Published weaknesses of other model servers, tried on a whole server process."""

from __future__ import annotations

import itertools
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.served import Served, served

pytestmark = pytest.mark.slow

TOOL_TEMPLATE = Path(__file__).parent.parent / "conformance" / "tools.jinja"
HI = [{"role": "user", "content": "the cat eats"}]


@pytest.fixture(scope="module")
def server(
    tiny_model_dir: Path, tiny_draft_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    model = tmp_path_factory.mktemp("tools") / "model"
    shutil.copytree(tiny_model_dir, model)
    shutil.copy(TOOL_TEMPLATE, model / "chat_template.jinja")
    flags = ["--model", str(model), "--draft", str(tiny_draft_dir), "--served-names", "tiny"]
    flags += ["--kv.memory-mib", "16", "--kv.draft-memory-mib", "16", "--threads", "1"]
    with served(*flags) as server:
        server.wait_until_ready()
        yield server
        assert server.metric("slipstream_engine_restarts_total") == 0


@contextmanager
def health_answers_soon(server: Served) -> Iterator[None]:
    """While the block runs, and there is an answer at least once."""
    ended = threading.Event()

    def ask() -> float:
        slowest = 0.0
        while True:
            began = time.monotonic()
            assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
            slowest = max(slowest, time.monotonic() - began)
            if ended.wait(0.05):
                return slowest

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        try:
            yield
        finally:
            ended.set()
        assert asking.result() < 2


EXTREMES: list[dict[str, Any]] = [
    {"frequency_penalty": 2.0, "presence_penalty": 2.0},
    {"frequency_penalty": -2.0, "presence_penalty": -2.0},
    {"repetition_penalty": 100.0},
    {"repetition_penalty": 0.01},
    {"repetition_penalty": 1.3, "frequency_penalty": 1.5, "min_p": 1.0, "top_k": 1},
    {"logit_bias": {str(token): -100 for token in range(300)}, "presence_penalty": 2.0},
    {"min_tokens": 30, "repetition_penalty": 5.0, "stop": ["cat"], "logprobs": 5},
]


@pytest.mark.parametrize("mode", ["auto", "predicted", "ngram", "universal"])
def test_penalties_under_speculation_do_not_kill_the_engine(server: Served, mode: str) -> None:
    """All at once, in one batch, greedy and sampled; and every answer is that of plain decoding."""

    def text(fields: dict[str, Any], mode: str) -> str:
        body = {"model": "tiny", "prompt": "the cat the cat the cat", "max_tokens": 40, "seed": 3}
        body["prediction"] = {"type": "content", "content": " the cat the cat the cat eats"}
        body["speculation"] = {"mode": mode, "max_draft_tokens": 8}
        response = httpx.post(f"{server.url}/v1/completions", json=body | fields, timeout=60)
        assert response.status_code == 200, response.text
        answer: str = response.json()["choices"][0]["text"]
        return answer

    requests = [
        fields | {"temperature": temperature}
        for fields, temperature in itertools.product(EXTREMES, (0.0, 1.5))
    ]
    with ThreadPoolExecutor(len(requests)) as pool:
        plain = list(pool.map(lambda fields: text(fields, "off"), requests))
        drafted = list(pool.map(lambda fields: text(fields, mode), requests))
    assert drafted == plain
    assert len(set(plain)) > len(EXTREMES)


BAD_PATTERNS = ["(((((a*)*)*)*", "(["]
UNENFORCED_PATTERNS = ["(?<=a)b", r"(a)\1"]
ODD_PATTERNS = [
    "\\",
    "^((a{1,300}){1,300}){1,300}$",
    r"(\w|\p{L}){1,5000}\d(?:[^x]{3,900}y){1,90}",
    "^(a|a|a|aa)*(a*)*b$",
]
"""Which may be taken or not."""


def requests_with_tool(pattern: str, *, forced: bool) -> list[tuple[str, dict[str, Any]]]:
    """Path and body, one for each API."""
    schema = {"type": "object", "properties": {"x": {"type": "string", "pattern": pattern}}}
    schema["required"] = ["x"]
    function = {"name": "f", "parameters": schema}
    choice = {"tool_choice": "required"} if forced else {}
    chat = {"messages": HI, "max_tokens": 5, "tools": [{"type": "function", "function": function}]}
    responses = {"input": "the cat eats", "max_output_tokens": 5}
    responses["tools"] = [{"type": "function", **function}]
    messages = {"messages": HI, "max_tokens": 5, "tools": [{"name": "f", "input_schema": schema}]}
    return [
        ("/v1/chat/completions", chat | choice),
        ("/v1/responses", responses | choice),
        ("/v1/messages", messages | ({"tool_choice": {"type": "any"}} if forced else {})),
    ]


@pytest.mark.parametrize("pattern", BAD_PATTERNS + ODD_PATTERNS)
def test_bad_tool_patterns_are_decided_soon_and_hold_nobody_up(
    server: Served, pattern: str
) -> None:
    for path, body in requests_with_tool(pattern, forced=True):
        with health_answers_soon(server):
            began = time.monotonic()
            response = httpx.post(f"{server.url}{path}", json={"model": "tiny", **body}, timeout=60)
            assert time.monotonic() - began < 10
        if pattern in ODD_PATTERNS and response.status_code == 200:
            continue
        assert response.status_code == 400, (path, response.text)
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert "grammar" in error["message"] or "tools" in error["message"], error
    for path, body in requests_with_tool(pattern, forced=False):
        response = httpx.post(f"{server.url}{path}", json={"model": "tiny", **body}, timeout=60)
        assert response.status_code == 200, "what nothing is held to harms nobody"


@pytest.mark.parametrize("pattern", UNENFORCED_PATTERNS)
def test_tool_patterns_that_are_not_enforced_are_told(server: Served, pattern: str) -> None:
    for path, body in requests_with_tool(pattern, forced=True):
        with health_answers_soon(server):
            response = httpx.post(f"{server.url}{path}", json={"model": "tiny", **body}, timeout=60)
        assert response.status_code == 200, (path, response.text)
        assert "pattern" in response.headers["X-Schema-Not-Enforced"]


def test_good_tool_pattern_is_held_to(server: Served) -> None:
    """Which shows that the bad ones are refused for what they are."""
    for path, body in requests_with_tool("^[ab]{2}$", forced=True):
        response = httpx.post(f"{server.url}{path}", json={"model": "tiny", **body}, timeout=60)
        assert response.status_code == 200, (path, response.text)


def test_slow_tokenizing_holds_nobody_up(server: Served) -> None:
    """Bodies of almost the limit, as many at once as there are threads to encode them."""
    prompt = "the cat eats Zoë's 🦊 " * 40_000
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1}
    with health_answers_soon(server), ThreadPoolExecutor(8) as pool:
        posts = [
            pool.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=120)
            for _ in range(8)
        ]
        for post in posts:
            response = post.result()
            assert response.status_code == 400
            assert response.json()["error"]["code"] == "context_length_exceeded"
