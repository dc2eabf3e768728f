"""A client that goes away costs nothing: its requests are aborted and no task stays behind."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest

from server.apis.shared.http.disconnect import run_until_disconnect
from tests.server.live_server import live_server, wait_until

BODIES = {
    "/v1/completions": {"model": "tiny/model", "prompt": ["a", "b"], "n": 2},
    "/v1/chat/completions": {
        "model": "tiny/model",
        "messages": [{"role": "user", "content": "Hi"}],
        "n": 2,
    },
}


class Connection:
    """Drives the app by ASGI messages, so that a test decides when the client goes away."""

    def __init__(self, app, path, *, accepts_events=True, sends_whole_body=True, **fields):
        self._accepts_events = accepts_events
        self._sends_whole_body = sends_whole_body
        self._body = json.dumps({**BODIES[path], **fields}).encode()
        self._has_sent_body = False
        self._gone = asyncio.Event()
        self.received = []
        self.got_event = asyncio.Event()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json"), (b"host", b"test")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self):
        if not self._has_sent_body:
            self._has_sent_body = True
            return {
                "type": "http.request",
                "body": self._body,
                "more_body": not self._sends_whole_body,
            }
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message):
        if message.get("body", b"").startswith(b"data:"):
            self.got_event.set()
            if not self._accepts_events:
                await asyncio.Event().wait()
        self.received.append(message)

    async def leave(self):
        self._gone.set()
        await asyncio.wait_for(self.task, timeout=2)


async def until(condition):
    async with asyncio.timeout(2):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


@pytest.fixture
async def no_task_left():
    yield
    await asyncio.sleep(0)
    others = asyncio.all_tasks() - {asyncio.current_task()}
    assert not others


@pytest.mark.parametrize("path", list(BODIES))
@pytest.mark.parametrize("hold_after", [0, 2])
async def test_whole_response(app, engine, no_task_left, path, hold_after):
    engine.hold_after = hold_after
    connection = Connection(app, path)
    await until(lambda: engine.num_requests > 0)
    await asyncio.sleep(0.01)
    num_requests = engine.num_requests
    await connection.leave()
    assert engine.num_requests == 0
    assert len(engine.aborted) == num_requests == len(engine.submitted)


@pytest.mark.parametrize("path", list(BODIES))
async def test_stream_before_the_first_token(app, engine, no_task_left, path):
    engine.hold_after = 0
    connection = Connection(app, path, stream=True)
    await until(lambda: connection.received)
    await connection.leave()
    assert engine.num_requests == 0
    assert len(engine.aborted) == len(engine.submitted)
    assert not connection.got_event.is_set()


@pytest.mark.parametrize("path", list(BODIES))
@pytest.mark.parametrize("n", [1, 3])
async def test_stream_in_mid_generation(app, engine, no_task_left, path, n):
    engine.hold_after = 2
    connection = Connection(app, path, stream=True, n=n)
    await connection.got_event.wait()
    await connection.leave()
    assert engine.num_requests == 0
    assert len(engine.aborted) == len(engine.submitted)
    assert not any(b"[DONE]" in message.get("body", b"") for message in connection.received)


@pytest.mark.parametrize("stream", [False, True])
async def test_while_the_prompt_is_encoded(app, engine, no_task_left, stream):
    engine.encode_gate = asyncio.Event()
    connection = Connection(app, "/v1/completions", stream=stream)
    await asyncio.sleep(0.01)
    await connection.leave()
    assert engine.submitted == []


async def test_while_the_body_is_sent(app, engine, no_task_left, caplog):
    connection = Connection(app, "/v1/completions", sends_whole_body=False)
    await connection.leave()
    assert engine.submitted == []
    assert caplog.text == ""


async def test_client_that_leaves_at_once(app, engine, no_task_left):
    engine.hold_after = 1
    connection = Connection(app, "/v1/completions", stream=True)
    await connection.leave()
    assert engine.num_requests == 0


async def test_client_that_leaves_without_reading(app, engine, no_task_left):
    connection = Connection(app, "/v1/completions", stream=True, accepts_events=False)
    await connection.got_event.wait()
    await connection.leave()
    assert engine.num_requests == 0


@pytest.mark.parametrize("path", list(BODIES))
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hold_after", [0, 2])
def test_over_a_socket(app, engine, path, stream, hold_after):
    engine.hold_after = hold_after
    body = json.dumps({**BODIES[path], "stream": stream}).encode()
    with live_server(app) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(
                f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\n\r\n".encode()
                + body
            )
            wait_until(lambda: engine.num_requests > 0)
            if stream and hold_after:
                while b"data:" not in connection.recv(4096):
                    pass
        wait_until(lambda: engine.num_requests == 0)
        assert len(engine.aborted) == len(engine.submitted)


def test_many_clients_leave_over_sockets(app, engine):
    engine.hold_after, engine.max_requests = 1, 1000
    body = json.dumps({**BODIES["/v1/completions"], "stream": True}).encode()
    with live_server(app) as url:
        host, port = url.removeprefix("http://").split(":")
        connections = [socket.create_connection((host, int(port))) for _ in range(50)]
        for connection in connections:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                + f"Content-Length: {len(body)}\r\n\r\n".encode()
                + body
            )
        wait_until(lambda: len(engine.submitted) == 200)
        for connection in connections:
            connection.close()
        wait_until(lambda: engine.num_requests == 0)
        assert len(engine.aborted) == 200


class Stream:
    """A result that holds on to a generation."""

    def __init__(self):
        self.closed = False

    def close(self):
        self.closed = True


@pytest.mark.parametrize("client_leaves", [False, True])
@pytest.mark.parametrize("num_turns", range(1, 7))
async def test_answer_that_nobody_takes_is_closed(no_task_left, client_leaves, num_turns):
    """A cancellation, by a deadline, meets the answer at any turn of the loop around its end."""
    gone = asyncio.Event()
    answers: list[Stream] = []

    async def receive():
        await gone.wait()
        return {"type": "http.disconnect"}

    async def work() -> Stream:
        for _ in range(3):
            await asyncio.sleep(0)
        answers.append(Stream())
        return answers[0]

    running = asyncio.create_task(run_until_disconnect(receive, work()))
    for _ in range(num_turns):
        await asyncio.sleep(0)
    if client_leaves:
        gone.set()
    else:
        running.cancel()
    taken: Any
    (taken,) = await asyncio.gather(running, return_exceptions=True)
    assert all(answer is taken or answer.closed for answer in answers)


async def test_cancelled_request_whose_stream_was_ready_is_aborted(app, engine, no_task_left):
    """The cancellation comes in the very turn of the loop in which the generation is submitted."""
    engine.hold_after = 0
    submit = engine.submit

    def submit_and_cancel(*request):
        stream = submit(*request)
        connection.task.cancel()
        return stream

    engine.submit = submit_and_cancel
    connection = Connection(app, "/v1/chat/completions", stream=True, n=1)
    await asyncio.gather(connection.task, return_exceptions=True)
    assert connection.task.cancelled()
    assert len(engine.submitted) == 1
    assert engine.num_requests == 0
