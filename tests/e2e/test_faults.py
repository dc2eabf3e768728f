"""Faults: what the client sees of each, and how soon the server is well again.

`pytest tests/e2e --fault-table` prints both; docs/operations.md has the table.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from engine.build import EngineParts, load_parts
from engine.plan import StepPlan
from engine.verify import INVALID_LOGITS
from tests.e2e.fault_table import Note
from tests.e2e.faulty import (
    BODY_TIMEOUT,
    HEADER_TIMEOUT,
    Server,
    always,
    faulty_server,
    no_fault,
    raises_for,
    raw_request,
    tiny_config,
    until,
)

pytestmark = pytest.mark.slow

SAMPLED: dict[str, Any] = {"temperature": 0.8, "seed": 5, "max_tokens": 60}
LONG: dict[str, Any] = {"max_tokens": 400, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def parts(tiny_model_dir: Path, tiny_draft_dir: Path) -> EngineParts:
    return load_parts(tiny_config(str(tiny_model_dir), str(tiny_draft_dir)))


@pytest.fixture(scope="module")
def shared(parts: EngineParts) -> Iterator[Server]:
    with faulty_server(parts, max_unread_outputs=64) as server:
        yield server


@pytest.fixture
def server(shared: Server) -> Iterator[Server]:
    yield shared
    shared.target.fault = shared.draft.fault = no_fault
    shared.target.spoil = lambda plan, logits: None
    shared.check_nothing_held()
    assert shared.health() == (200, "ok")
    assert shared.engine.metrics().restarts == 0


def neighbours(server: Server, count: int = 4) -> list[str]:
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda i: server.text(**SAMPLED | {"seed": i}), range(count)))


def seconds_to_answer(server: Server) -> float:
    """Of one request as anyone might send it now."""
    began = time.monotonic()
    server.text(**SAMPLED)
    return time.monotonic() - began


def test_draft_that_fails_for_good_degrades_to_plain_decoding(
    server: Server, note_fault: Note
) -> None:
    expected = server.text(**SAMPLED)
    server.draft.fault = always
    answer = server.text(**SAMPLED, speculation={"mode": "universal", "stats": True})
    assert answer == expected
    failing = server.speculation()["failing"]["universal"]
    assert failing["error"] == "RuntimeError"
    assert failing["retry_in_seconds"] > 0
    metrics = httpx.get(f"{server.url}/metrics", timeout=60).text
    assert 'slipstream_drafter_works{drafter="universal"} 0.0' in metrics
    server.draft.fault = no_fault

    def works() -> bool:
        assert server.text(**SAMPLED) == expected
        return not server.speculation()["failing"]

    seconds = until(works)
    assert seconds < 10
    note_fault("the draft is killed", "the same answers, without drafts", seconds)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["raises", "invalid logits"])
def test_fault_of_one_request_is_its_own(
    server: Server, kind: str, stream: bool, note_fault: Note
) -> None:
    expected = neighbours(server)
    began: list[str] = []

    def is_bad(request_id: str) -> bool:
        return bool(began) and request_id.startswith(began[0])

    def fault(plan: StepPlan) -> None:
        if kind == "raises" and any(is_bad(chunk.request_id) for chunk in plan.chunks):
            raise RuntimeError("a kernel failed")

    def spoil(plan: StepPlan, logits: torch.Tensor) -> None:
        first = 0
        for chunk in plan.chunks:
            if kind == "invalid logits" and is_bad(chunk.request_id):
                logits[first : first + chunk.num_logits] = torch.nan
            first += chunk.num_logits

    server.target.fault, server.target.spoil = fault, spoil
    with ThreadPoolExecutor(1) as pool:
        if stream:
            with server.stream(**LONG) as chunks:
                began.append(next(chunks)["id"])
                answers = pool.submit(neighbours, server)
                last = list(chunks)[-1]
        else:
            began.append("cmpl")
            last = server.post(**LONG).json()
            began.clear()
            answers = pool.submit(neighbours, server)
        error = last["error"]
        assert answers.result() == expected
    assert error["code"] == "generation_failed"
    assert error["type"] == "server_error"
    assert (error["message"] == INVALID_LOGITS) == (kind == "invalid logits")
    assert "kernel" not in error["message"], "the log has the details"
    fault_name = {"raises": "a step raises for one request", "invalid logits": "NaN logits"}[kind]
    seen = "that request 500, or an error event; the others their answers"
    note_fault(fault_name, seen, seconds_to_answer(server))


def test_broken_engine_restarts_and_serves_what_waits(parts: EngineParts, note_fault: Note) -> None:
    config = parts.config.model_copy(
        update={"scheduler": parts.config.scheduler.model_copy(update={"max_running": 2})}
    )
    with faulty_server(replace(parts, config=config)) as server, ThreadPoolExecutor(8) as pool:
        expected = neighbours(server, 6)
        server.hold()
        posts = []
        for seed in range(6):
            posts.append(pool.submit(server.post, **SAMPLED | {"seed": seed}))
            until(lambda: server.engine.num_requests == len(posts))
        seen: list[tuple[int, str]] = []

        def broken_until_seen(plan: StepPlan) -> None:
            if threading.current_thread().name == "slipstream-engine":
                seen.append(server.health())
                if seen[-1][1] == "restarting":
                    server.target.fault = no_fault
                    return
            raise RuntimeError("the device is gone")

        server.target.fault = broken_until_seen
        began = time.monotonic()
        server.gate.set()
        answers = [post.result() for post in posts]
        took = time.monotonic() - began
        assert (503, "restarting") in seen
        failed = [a for a in answers if a.status_code == 500]
        assert 1 <= len(failed) <= 2
        for index, answer in enumerate(answers):
            if answer.status_code == 200:
                assert answer.json()["choices"][0]["text"] == expected[index]
            else:
                assert answer.json()["error"]["code"] == "generation_failed"
        assert took < 10
        assert server.health() == (200, "ok")
        assert server.engine.metrics().restarts == 1
        server.check_nothing_held()
        told = "running requests 500, or an error event; waiting ones their answers"
        note_fault("steps raise for everyone, once", told, took)


class Panic(BaseException):
    """As pyo3's PanicException: no subclass of Exception."""


def panics(plan: StepPlan) -> None:
    raise Panic("unwrap of None")


@pytest.mark.parametrize("stream", [False, True])
def test_panic_in_one_requests_step_is_its_own(server: Server, stream: bool) -> None:
    expected = neighbours(server)
    began: list[str] = []

    def panics_for_one(plan: StepPlan) -> None:
        if began and any(piece.request_id.startswith(began[0]) for piece in plan.chunks):
            raise Panic("unwrap of None")

    server.target.fault = panics_for_one
    if stream:
        with server.stream(**LONG) as chunks:
            began.append(next(chunks)["id"])
            last = list(chunks)[-1]
    else:
        began.append("cmpl")
        last = server.post(**LONG).json()
    assert last["error"]["code"] == "generation_failed"
    began.clear()
    assert neighbours(server) == expected


def test_panic_of_the_draft_costs_its_drafts(server: Server) -> None:
    expected = server.text(**SAMPLED)
    server.draft.fault = panics
    assert server.text(**SAMPLED, speculation={"mode": "universal"}) == expected
    assert server.speculation()["failing"]["universal"]["error"] == "Panic"
    server.draft.fault = no_fault

    def works() -> bool:
        assert server.text(**SAMPLED) == expected
        return not server.speculation()["failing"]

    until(works)


@pytest.mark.parametrize("where", ["every pass", "bookkeeping", "delivery"])
def test_panic_that_lasts_ends_every_stream_and_shows_in_health(
    parts: EngineParts, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def panic(*_: object) -> None:
        raise Panic("unwrap of None")

    with faulty_server(parts, max_restarts=0) as server, ThreadPoolExecutor(3) as pool:

        def last_event(seed: int) -> dict[str, Any]:
            with server.stream(**LONG | {"seed": seed}) as chunks:
                return list(chunks)[-1]

        server.hold()
        lasts = [pool.submit(last_event, seed) for seed in range(3)]
        until(lambda: server.engine.num_requests == 3)
        thread = server.engine._thread
        if where == "every pass":
            server.target.fault = panics
        else:
            server.target.fault = no_fault
        if where == "bookkeeping":
            assert thread.core is not None
            monkeypatch.setattr(thread.core.scheduler, "commit", panic)
            monkeypatch.setattr(thread.core.scheduler, "finish", panic)
        elif where == "delivery":
            failing = replace(thread._callbacks, outputs=panic)
            monkeypatch.setattr(thread, "_callbacks", failing)
        server.gate.set()
        for last in lasts:
            assert last.result(timeout=20)["error"]["code"] == "generation_failed"
        until(lambda: server.health() == (503, "dead"))
        refused = server.post(**SAMPLED)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "engine_unavailable"


@pytest.mark.parametrize("kind", [Panic, SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("what", ["prompt", "prediction", "grammar"])
def test_panic_in_a_requests_preparation_is_its_own(
    server: Server, kind: type[BaseException], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = server.text(**SAMPLED)
    core = server.engine._thread.core
    assert core is not None

    def panic(*_: object, **__: object) -> None:
        raise kind("unwrap of None")

    fields: dict[str, Any] = {}
    if what == "grammar":
        fields["guided_regex"] = "a+"
        monkeypatch.setattr(core.grammars, "compile", panic)
    elif what == "prediction":
        fields["prediction"] = {"type": "content", "content": "the cat eats"}
        monkeypatch.setattr(core.tokenizer, "encode_plain", panic)
    else:
        monkeypatch.setattr(core.tokenizer, "encode", panic)
    for stream in (False, True):
        response = server.post(**SAMPLED, **fields, stream=stream)
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "server_error"
    monkeypatch.undo()
    assert server.text(**SAMPLED) == expected


def test_engine_that_stays_broken_says_so(parts: EngineParts, note_fault: Note) -> None:
    with faulty_server(parts, max_restarts=1) as server:
        server.target.fault = always
        assert server.post(**SAMPLED).status_code in (500, 503)
        until(lambda: server.health() == (503, "dead"))
        refused = server.post(**SAMPLED)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "engine_unavailable"
        assert "slipstream_engine_ready 0.0" in httpx.get(f"{server.url}/metrics").text
        seen = "500, then 503 at once; the liveness probe has the process replaced"
        note_fault("steps go on raising for everyone", seen, None)


def test_stalled_step_shows_in_health_and_passes(parts: EngineParts, note_fault: Note) -> None:
    with faulty_server(parts, stall_seconds=0.1) as server, ThreadPoolExecutor(1) as pool:
        expected = server.text(**SAMPLED)
        server.hold()
        answer = pool.submit(server.text, **SAMPLED)
        until(lambda: server.health() == (503, "stalled"))
        assert "slipstream_num_requests_running" in httpx.get(f"{server.url}/metrics").text
        server.target.fault = no_fault
        server.gate.set()
        assert answer.result() == expected
        seconds = until(lambda: server.health() == (200, "ok"))
        assert seconds < 1
        note_fault("a step stalls", "a pause, then the answer; `/health` 503 meanwhile", seconds)


def test_client_that_does_not_read_is_cut_off(server: Server, note_fault: Note) -> None:
    aborted = server.engine.metrics().finished["abort"]
    expected = neighbours(server)
    fields = LONG | {"stream": True, "logprobs": 20, "max_tokens": 480, "n": 16}
    slow = raw_request(server, 2048, **fields)
    until(lambda: server.engine.num_requests == 16)
    assert neighbours(server) == expected
    seconds = until(server.is_idle, timeout=30)
    assert server.engine.metrics().finished["abort"] > aborted
    slow.close()
    note_fault("a reader is slow", "its stream ends; others nothing", seconds)


def test_dead_peers_are_found_by_the_system() -> None:
    from server.process.listener import DEAD_PEER_SECONDS, listen

    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            timeout = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert timeout == 1000 * DEAD_PEER_SECONDS
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_half_open_connections_are_no_burden(server: Server, note_fault: Note) -> None:
    expected = neighbours(server)
    before = num_descriptors()
    host, port = server.url.removeprefix("http://").split(":")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\n"
    body_begins = f"{head}Content-Type: application/json\r\nContent-Length: 500\r\n\r\n{{"
    beginnings = ["", "POST /v1/com", head, body_begins]
    began = time.monotonic()
    with ExitStack() as stack:
        connections = [
            stack.enter_context(socket.create_connection((host, int(port)), timeout=10))
            for _ in range(200)
        ]
        for index, connection in enumerate(connections):
            connection.sendall(beginnings[index % len(beginnings)].encode())
        assert neighbours(server) == expected
        assert server.health() == (200, "ok")
        until(lambda: num_descriptors() <= before + len(connections) + 8)
        seconds = time.monotonic() - began
        assert seconds < HEADER_TIMEOUT + BODY_TIMEOUT
        for index, connection in enumerate(connections):
            answer = connection.recv(4096)
            assert answer.startswith(b"HTTP/1.1 408 ") if beginnings[index % 4] else answer == b""
    seen = f"408 after {HEADER_TIMEOUT:g} s (head) or {BODY_TIMEOUT:g} s (body); others nothing"
    note_fault("200 half-open connections", seen, seconds)


def test_storm_of_disconnects_leaves_nothing(server: Server, note_fault: Note) -> None:
    expected = neighbours(server)
    before = num_descriptors()
    connections = [raw_request(server, **LONG, stream=index % 2 == 0) for index in range(120)]
    until(lambda: server.engine.num_requests > 60)
    for connection in connections:
        connection.close()
    seconds = until(server.is_idle)
    assert seconds < 10
    until(lambda: num_descriptors() <= before + 8)
    assert neighbours(server) == expected
    note_fault("120 clients disconnect at once", "others nothing", seconds)


@pytest.mark.parametrize("jump", [-1e6, 1e6])
def test_clock_jumps_are_not_noticed(
    server: Server, jump: float, monkeypatch: pytest.MonkeyPatch, note_fault: Note
) -> None:
    expected = server.text(**LONG)
    metrics = server.engine.metrics()
    count, total = metrics.e2e.count, metrics.e2e.total
    real = time.time
    with server.stream(**LONG) as chunks:
        texts = [next(chunks)["choices"][0]["text"]]
        monkeypatch.setattr(time, "time", lambda: real() + jump)
        texts += [chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"]]
    assert "".join(texts) == expected
    assert server.health() == (200, "ok")
    assert metrics.e2e.count == count + 1
    assert 0 < metrics.e2e.total - total < 60
    note_fault("the clock jumps by 11 days", "nothing", None)


class FullDisk:
    """A log file on a disk that is full."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_full_disk_of_the_log_stops_nothing(
    server: Server, monkeypatch: pytest.MonkeyPatch, note_fault: Note
) -> None:
    monkeypatch.setattr("sys.stderr", FullDisk())
    handler = logging.StreamHandler(FullDisk())
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        logging.getLogger("engine").error("this can't be written")
        expected = neighbours(server)
        server.draft.fault = raises_for("")
        assert neighbours(server) == expected
    finally:
        root.removeHandler(handler)
    note_fault("the disk of the log is full", "nothing", None)
