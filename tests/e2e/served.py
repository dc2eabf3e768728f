"""`slipstream serve` as a process of its own."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx


@dataclass
class Served:
    url: str
    process: subprocess.Popen[str]
    log: list[str]

    def wait_until_ready(self, timeout: float = 120.0) -> None:
        deadline = time.monotonic() + timeout
        while httpx.get(f"{self.url}/health", timeout=60).status_code != 200:
            assert self.process.poll() is None, "".join(self.log)
            assert time.monotonic() < deadline, "".join(self.log)
            time.sleep(0.1)

    def metric(self, name: str) -> float:
        """A sample without labels."""
        text = httpx.get(f"{self.url}/metrics", timeout=60).text
        match = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        assert match is not None, name
        return float(match[1])


def tiny_flags(model: Path, draft: Path) -> list[str]:
    """For a small server of these models, under the name `tiny`, on one thread."""
    flags = ["--model", str(model), "--draft", str(draft), "--served-names", "tiny"]
    return [*flags, "--kv.memory-mib", "16", "--kv.draft-memory-mib", "16", "--threads", "1"]


@contextmanager
def served(*flags: str) -> Iterator[Served]:
    """Serve on a free port until the block ends; a clean end is part of the contract."""
    process = subprocess.Popen(
        [sys.executable, "-m", "server.cli.main", "serve", "--port", "0", *flags],
        stderr=subprocess.PIPE,
        text=True,
    )
    log: list[str] = []
    url_known = threading.Event()

    def read_log() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            log.append(line)
            if "listening on" in line:
                url_known.set()
        url_known.set()

    reader = threading.Thread(target=read_log)
    reader.start()
    try:
        assert url_known.wait(timeout=60)
        match = re.search(r"listening on (http://\S+),", "".join(log))
        assert match is not None, "".join(log)
        yield Served(match[1], process, log)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0, "".join(log)
    finally:
        process.kill()
        process.wait()
        reader.join()
        assert process.stderr is not None
        process.stderr.close()
    assert "Traceback" not in "".join(log), "".join(log)
