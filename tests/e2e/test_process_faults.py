"""Faults of a whole process: it says in one line why it can't start, and starts once it can."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from server.process.listener import listen
from tests.e2e.fault_table import Note
from tests.e2e.served import served
from tests.e2e.test_drain import Stream

pytestmark = pytest.mark.slow

NO_CONNECTION = "no connection; the log one line that says why"


def serve_command(model: Path, *flags: str) -> list[str]:
    command = [sys.executable, "-m", "server.cli.main", "serve", "--port", "0", "--threads", "1"]
    return [*command, "--model", str(model), "--log-level", "warning", *flags]


def why_it_ends(command: Sequence[str], cache: Path | None = None) -> str:
    """The one line of a server that can't start."""
    environment = os.environ if cache is None else {**os.environ, "SLIPSTREAM_CACHE": str(cache)}
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert run.returncode == 1, run.stderr
    assert run.stderr.startswith("slipstream: error: ")
    assert run.stderr.count("\n") == 1, run.stderr
    return run.stderr


def seconds_to_start(model: Path, *flags: str) -> float:
    began = time.monotonic()
    with served("--model", str(model), "--threads", "1", "--kv.memory-mib", "16", *flags) as server:
        server.wait_until_ready()
        return time.monotonic() - began


def test_truncated_model_file(tiny_model_dir: Path, tmp_path: Path, note_fault: Note) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model_dir, model)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5000])
    assert "model.safetensors: cut short: " in why_it_ends(serve_command(model))
    shutil.copy(tiny_model_dir / "model.safetensors", weights)
    note_fault("the model file is truncated", NO_CONNECTION, seconds_to_start(model, "--port", "0"))


def test_busy_port(tiny_model_dir: Path, note_fault: Note) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        line = why_it_ends(serve_command(tiny_model_dir, "--port", port))
        assert f"can't listen on 127.0.0.1:{port}: Address already in use" in line
    seconds = seconds_to_start(tiny_model_dir, "--port", port)
    note_fault("the port is busy", NO_CONNECTION, seconds)


def can_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    command = ["unshare", "--user", "--map-root-user", "--mount", "true"]
    return subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.skipif(not can_mount(), reason="this system has no user namespaces to mount in")
def test_full_disk_of_the_cache(
    tiny_model_dir: Path, tmp_path: Path, note_fault: Note, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system of 64 KiB of its own, which no packed model fits on."""
    cache = tmp_path / "cache"
    cache.mkdir()
    mount = f'mount -t tmpfs -o size=64k tmpfs {cache} && exec "$@"'
    isolated = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh"]
    line = why_it_ends([*isolated, *serve_command(tiny_model_dir, "--runner", "native")], cache)
    assert "No space left on device" in line
    assert str(cache) in line
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(cache))
    seconds = seconds_to_start(tiny_model_dir, "--port", "0", "--runner", "native")
    note_fault("the disk of the cache is full", NO_CONNECTION, seconds)


def test_stop_signal_under_load(tiny_model_dir: Path, note_fault: Note) -> None:
    flags = ["--served-names", "tiny", "--kv.memory-mib", "16", "--scheduler.max-running", "4"]
    with served("--model", str(tiny_model_dir), "--threads", "1", *flags) as server:
        server.wait_until_ready()
        streams = [Stream(server.url, max_tokens=40, seed=number) for number in range(24)]
        for stream in streams:
            stream.start()
        assert streams[0].begun.wait(60)
        while server.metric("slipstream_num_requests_waiting") == 0:
            assert any(stream.is_alive() for stream in streams), "they all ended too soon"
        server.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert server.process.wait(30) == 0
        seconds = time.monotonic() - began
    for stream in streams:
        stream.join(30)
        assert stream.payloads[-1] == "[DONE]"
    seen = "its whole answer, even from the queue; new requests 503"
    note_fault("SIGTERM under load", seen, seconds)
