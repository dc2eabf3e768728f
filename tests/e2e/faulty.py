"""A server in this process, on tiny real models, whose parts can be made to fail."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import torch

from engine.build import EngineParts
from engine.config import Config
from engine.core import EngineCore
from engine.draft.drafter import Drafter
from engine.models.runner import ModelInfo, ModelRunner
from engine.plan import StepPlan
from engine.serving.async_engine import AsyncEngine
from server.app import create_app
from tests.server.live_server import live_server

Fault = Callable[[StepPlan], None]

HEADER_TIMEOUT = 1.5
BODY_TIMEOUT = 2.0


def no_fault(plan: StepPlan) -> None:
    """Lets the pass go on."""


class FaultyRunner:
    """Another runner, with a fault in front of its passes and one behind."""

    def __init__(self, inner: ModelRunner) -> None:
        self._inner = inner
        self.fault: Fault = no_fault
        self.spoil: Callable[[StepPlan, torch.Tensor], None] = lambda plan, logits: None

    @property
    def info(self) -> ModelInfo:
        return self._inner.info

    @property
    def block_size(self) -> int:
        return self._inner.block_size

    @property
    def num_blocks(self) -> int:
        return self._inner.num_blocks

    def execute(self, plan: StepPlan) -> torch.Tensor:
        self.fault(plan)
        logits = self._inner.execute(plan)
        self.spoil(plan, logits)
        return logits


def raises_for(response_id: str) -> Fault:
    def fault(plan: StepPlan) -> None:
        if any(chunk.request_id.startswith(response_id) for chunk in plan.chunks):
            raise RuntimeError("a kernel failed")

    return fault


def always(plan: StepPlan) -> None:
    raise RuntimeError("the device is gone")


@dataclass
class Server:
    url: str
    engine: AsyncEngine
    target: FaultyRunner
    draft: FaultyRunner
    gate: threading.Event = field(default_factory=threading.Event)

    def post(self, **fields: Any) -> httpx.Response:
        body = {"model": "tiny", "prompt": "the cat eats", "temperature": 0, **fields}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=60)

    def text(self, **fields: Any) -> str:
        response = self.post(**fields)
        assert response.status_code == 200, response.text
        text: str = response.json()["choices"][0]["text"]
        return text

    @contextmanager
    def stream(self, **fields: Any) -> Iterator[Iterator[dict[str, Any]]]:
        body = {"model": "tiny", "prompt": "the cat eats", "stream": True, **fields}
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=60) as response:
            assert response.status_code == 200
            yield events(response)

    def health(self) -> tuple[int, str]:
        response = httpx.get(f"{self.url}/health", timeout=60)
        return response.status_code, response.json()["status"]

    def speculation(self) -> dict[str, Any]:
        state: dict[str, Any] = httpx.get(f"{self.url}/v1/speculation", timeout=60).json()
        return state

    def hold(self) -> None:
        """Make the next pass wait until `self.gate` is set."""
        self.gate.clear()
        self.target.fault = lambda plan: assert_true(self.gate.wait(30))

    def is_idle(self) -> bool:
        core = self.engine._thread.core
        assert core is not None
        return self.engine.num_requests == 0 and not core.has_work

    def check_nothing_held(self) -> None:
        until(self.is_idle)
        core = self.engine._thread.core
        assert core is not None
        core.check_integrity()
        assert core.scheduler.pool.usage == 0


def assert_true(value: bool) -> None:
    assert value


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def until(condition: Callable[[], bool], timeout: float = 10.0) -> float:
    """Wait for it; returns the seconds it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout, "it did not come true in time"
        time.sleep(0.005)
    return time.monotonic() - began


@contextmanager
def faulty_server(parts: EngineParts, **recovery: float) -> Iterator[Server]:
    """Serve on a free port; every core is made of the same loaded models."""
    target = FaultyRunner(parts.target)
    drafts: list[FaultyRunner] = []

    def make_drafters() -> tuple[Drafter, ...]:
        drafters: Sequence[Any] = parts.make_drafters()
        for drafter in drafters:
            if drafter.name == "universal":
                fault = drafts[-1].fault if drafts else no_fault
                drafts.append(FaultyRunner(drafter.model.runner))
                drafts[-1].fault = fault
                drafter.model.runner = drafts[-1]
        return tuple(drafters)

    config = parts.config.model_copy(
        update={"recovery": parts.config.recovery.model_copy(update=recovery)}
    )
    loaded = replace(parts, target=target, make_drafters=make_drafters)

    def load() -> Callable[[], EngineCore]:
        return loaded.start_core

    engine = AsyncEngine(load, max_requests=256, recovery=config.recovery)
    with live_server(create_app(engine, config), config) as url:
        until(lambda: httpx.get(f"{url}/health", timeout=60).status_code == 200, timeout=60)
        yield Server(url, engine, target, drafts[-1])


def raw_request(server: Server, receive_buffer: int | None = None, **fields: Any) -> socket.socket:
    """A connection that has sent a request and reads nothing."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.connect((host, int(port)))
    body = json.dumps({"model": "tiny", "prompt": "the cat eats", **fields})
    connection.sendall(
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
    )
    return connection


def tiny_config(target: str, draft: str) -> Config:
    return Config(
        model=target,
        draft=draft,
        served_names=("tiny",),
        threads=1,
        kv={"memory_mib": 16, "draft_memory_mib": 16},
        limits={"header_timeout": HEADER_TIMEOUT, "body_timeout": BODY_TIMEOUT},
        speculation={"policy": "fixed", "drafters": ["universal"]},
    )
