"""Half-sent requests over real sockets: answered 408 and closed, while others are served."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx
import pytest

from engine.config import Config
from server.app import create_app
from tests.server.live_server import live_server
from tests.server.scripted_engine import ScriptedEngine

HEADER_TIMEOUT = 0.4
BODY_TIMEOUT = 0.7
SLACK = 0.35
BODY = json.dumps({"model": "tiny/model", "prompt": "a"})
POST = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
WHOLE = f"{POST}Content-Length: {len(BODY)}\r\n\r\n{BODY}"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    limits = {"header_timeout": HEADER_TIMEOUT, "body_timeout": BODY_TIMEOUT}
    config = Config(limits=limits)
    with live_server(create_app(ScriptedEngine(), config), config) as url:
        yield url


class Connection:
    def __init__(self, url: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._socket = socket.create_connection((host, int(port)), timeout=10)
        self.began = time.monotonic()

    def send(self, text: str) -> None:
        self._socket.sendall(text.encode())

    def read_answer(self) -> httpx.Response:
        """One answer, with the connection left open."""
        received = b""
        while b"\r\n\r\n" not in received:
            received += self._socket.recv(65536)
        head, _, body = received.partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:])
        while len(body) < int(headers["content-length"]):
            body += self._socket.recv(65536)
        return httpx.Response(int(lines[0].split()[1]), headers=headers, content=body)

    def read_to_the_end(self) -> tuple[bytes, float]:
        """What comes until the server closes, and when it did, from the connection's start."""
        received = b""
        with suppress(ConnectionResetError):  # what is sent to a closed connection resets it
            while piece := self._socket.recv(65536):
                received += piece
        return received, time.monotonic() - self.began

    @contextmanager
    def dripping(self, text: str) -> Iterator[None]:
        """Send one byte after the other until the block ends or the server closes."""
        ended = threading.Event()

        def drip() -> None:
            for character in text:
                if ended.wait(0.02):
                    return
                try:
                    self.send(character)
                except OSError:
                    return

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def connection(url: str) -> Iterator[Connection]:
    connection = Connection(url)
    yield connection
    connection.close()
    assert httpx.get(f"{url}/health").status_code == 200


def assert_timed_out(received: bytes, code: str, limit: float) -> None:
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    assert b"connection: close" in head.lower()
    assert b"content-type: application/json" in head.lower()
    error = json.loads(body)["error"]
    assert (error["type"], error["code"], error["param"]) == ("timeout_error", code, None)
    assert f"limit of {limit:g} s" in error["message"]


def test_silence_is_closed_in_silence(connection: Connection) -> None:
    received, seconds = connection.read_to_the_end()
    assert received == b""
    assert HEADER_TIMEOUT <= seconds < HEADER_TIMEOUT + SLACK


@pytest.mark.parametrize("beginning", ["P", "POST /v1/com", POST, f"{POST}X-Long: aaaa"])
def test_half_a_head(connection: Connection, beginning: str) -> None:
    connection.send(beginning)
    received, seconds = connection.read_to_the_end()
    assert_timed_out(received, "header_timeout", HEADER_TIMEOUT)
    assert HEADER_TIMEOUT <= seconds < HEADER_TIMEOUT + SLACK


def test_head_that_drips(connection: Connection) -> None:
    with connection.dripping(POST + "X: a\r\n" * 100):
        received, seconds = connection.read_to_the_end()
    assert_timed_out(received, "header_timeout", HEADER_TIMEOUT)
    assert seconds < HEADER_TIMEOUT + SLACK


@pytest.mark.parametrize("framing", ["Content-Length: 1000", "Transfer-Encoding: chunked"])
@pytest.mark.parametrize("drips", [False, True])
def test_half_a_body(connection: Connection, framing: str, drips: bool) -> None:
    connection.send(f"{POST}{framing}\r\n\r\n")
    with connection.dripping("1\r\n \r\n" * 100 if drips else ""):
        received, seconds = connection.read_to_the_end()
    assert_timed_out(received, "body_timeout", BODY_TIMEOUT)
    assert b"x-request-id" in received.lower()
    assert BODY_TIMEOUT <= seconds < BODY_TIMEOUT + SLACK


def test_anthropics_shape(connection: Connection) -> None:
    connection.send(WHOLE.replace("/v1/completions", "/v1/messages")[:-1])
    received, _ = connection.read_to_the_end()
    assert received.startswith(b"HTTP/1.1 408 ")
    error = json.loads(received.partition(b"\r\n\r\n")[2])
    assert (error["type"], error["error"]["type"]) == ("error", "timeout_error")


@pytest.mark.parametrize("target", ["/nowhere", "/health"])
def test_body_that_nobody_reads(connection: Connection, target: str) -> None:
    """The answer comes at once; the rest of the body can't hold the connection."""
    connection.send(f"POST {target} HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n")
    answer = connection.read_answer()
    assert answer.status_code in (404, 405)
    assert time.monotonic() - connection.began < SLACK
    with connection.dripping(" " * 1000):
        received, seconds = connection.read_to_the_end()
    assert received == b""
    assert seconds < BODY_TIMEOUT + 2 * SLACK


def test_requests_in_time_keep_the_connection(connection: Connection) -> None:
    """Each has its own time, and none runs while the server works or the connection is idle."""
    for pause in (0.0, 1.5 * HEADER_TIMEOUT, 0.0):
        time.sleep(pause)
        for part in (WHOLE[:30], WHOLE[30:-9], WHOLE[-9:]):
            connection.send(part)
            time.sleep(HEADER_TIMEOUT / 2)
        assert connection.read_answer().status_code == 200


def test_second_request_has_its_own_time(connection: Connection) -> None:
    connection.send(WHOLE)
    assert connection.read_answer().status_code == 200
    time.sleep(1.2 * HEADER_TIMEOUT)
    connection.send(POST)
    sent = time.monotonic()
    received, _ = connection.read_to_the_end()
    assert_timed_out(received, "header_timeout", HEADER_TIMEOUT)
    assert HEADER_TIMEOUT <= time.monotonic() - sent < HEADER_TIMEOUT + SLACK


def test_half_a_request_behind_a_whole_one(connection: Connection) -> None:
    connection.send(WHOLE + POST)
    received, _ = connection.read_to_the_end()
    first, separator, second = received.partition(b"HTTP/1.1 408")
    assert first.startswith(b"HTTP/1.1 200 OK")
    assert_timed_out(separator + second, "header_timeout", HEADER_TIMEOUT)


def test_long_answers_are_not_cut(url: str) -> None:
    engine = ScriptedEngine(pace=HEADER_TIMEOUT)
    config = Config(limits={"header_timeout": HEADER_TIMEOUT / 4, "body_timeout": 0.1})
    body = {"model": "tiny/model", "prompt": "a"}
    with live_server(create_app(engine, config), config) as slow:
        response = httpx.post(f"{slow}/v1/completions", json=body, timeout=30)
        assert response.status_code == 200
        assert response.elapsed.total_seconds() > 2 * HEADER_TIMEOUT
        response = httpx.post(f"{slow}/v1/completions", json={**body, "stream": True}, timeout=30)
        assert response.text.endswith("data: [DONE]\n\n")


def test_what_is_not_http_is_told_so_in_json(connection: Connection) -> None:
    connection.send("NOT HTTP\r\n\r\n")
    received, _ = connection.read_to_the_end()
    assert received.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    error = json.loads(received.partition(b"\r\n\r\n")[2])["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_http")


def test_broken_body_framing_in_the_middle_of_an_answer_ends_the_connection(url: str) -> None:
    engine = ScriptedEngine(pace=0.1)
    config = Config()
    with live_server(create_app(engine, config), config) as slow:
        connection = Connection(slow)
        connection.send("GET /health HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert connection.read_answer().status_code == 200
        connection.send("zz\r\n\r\n")
        received, seconds = connection.read_to_the_end()
        assert received == b""
        assert seconds < 5
        connection.close()
