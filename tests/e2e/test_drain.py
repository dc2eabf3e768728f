"""A stop signal in the middle of work, as Kubernetes sends it."""

from __future__ import annotations

import json
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.served import Served, served

pytestmark = pytest.mark.slow

KEY = {"Authorization": "Bearer sk-drain-test"}


class Stream(threading.Thread):
    """Reads a streamed completion to its end, whatever that is."""

    def __init__(self, url: str, **fields: Any) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._fields = fields
        self.begun = threading.Event()
        self.payloads: list[str] = []

    def run(self) -> None:
        body = {"model": "tiny", "prompt": "the cat", "stream": True, "ignore_eos": True}
        with httpx.stream(
            "POST",
            f"{self._url}/v1/completions",
            json={**body, **self._fields},
            headers=KEY,
            timeout=60,
        ) as response:
            for line in response.iter_lines():
                if line.startswith("data: "):
                    self.payloads.append(line.removeprefix("data: "))
                    self.begun.set()


def test_it_finishes_what_it_can_tells_the_rest_and_takes_nothing_new(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("drainer:sk-drain-test\n")
    flags = ["--model", str(tiny_model_dir), "--served-names", "tiny", "--kv.memory-mib", "16"]
    flags += ["--api-keys-file", str(keys), "--admission.drain-timeout", "60"]
    with served(*flags, "--threads", "1", "--speculation.drafters", "ngram") as server:
        server.wait_until_ready()
        assert httpx.get(f"{server.url}/v1/models", timeout=60).status_code == 401
        short = Stream(server.url, max_tokens=60)
        long = Stream(server.url, max_tokens=230, n=12)
        for stream in (long, short):
            stream.start()
            assert stream.begun.wait(60)
        server.process.send_signal(signal.SIGTERM)
        assert _status_when_draining(server) == {"status": "draining"}
        refused = httpx.post(
            f"{server.url}/v1/completions",
            json={"model": "tiny", "prompt": "a"},
            headers=KEY,
            timeout=60,
        )
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "shutting_down"
        assert int(refused.headers["retry-after"]) >= 1
        short.join(60)
        assert short.payloads[-1] == "[DONE]"
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGTERM)
        long.join(60)
        error = json.loads(long.payloads[-1])["error"]
        assert error["message"] == "The server is shutting down."
        assert len(long.payloads) < 12 * 230
        assert server.process.wait(30) == 0
    log = "".join(server.log)
    assert "stopping in 60 s at most, requests in progress: 2" in log
    assert "stopping, requests cut off: 1" in log
    assert "sk-drain-test" not in log
    assert "the cat" not in log


def _status_when_draining(server: Served) -> Any:
    deadline = time.monotonic() + 10
    while True:
        response = httpx.get(f"{server.url}/health", timeout=60)
        if response.status_code == 503:
            return response.json()
        assert time.monotonic() < deadline
