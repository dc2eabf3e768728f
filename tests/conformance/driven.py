"""A driver's process: a task goes in as a line, what came of it comes out as one."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

QUIET = {
    "HF_HUB_OFFLINE": "1",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "true",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "OPENAI_API_KEY": "none",
}
"""So that no client calls home."""


@dataclass(frozen=True)
class Driven:
    process: subprocess.Popen[str]
    log: IO[str]

    def do(self, task: str, **arguments: object) -> Any:
        """The task's result; a client's error fails the test with all it said."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if self.process.poll() is None:
            self.process.stdin.write(json.dumps({"task": task, **arguments}) + "\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, self._said()
        reply = json.loads(line)
        assert "error" not in reply, reply["error"]
        return reply["result"]

    def _said(self) -> str:
        self.log.seek(0)
        return self.log.read()


@contextmanager
def driven(command: Sequence[str]) -> Iterator[Driven]:
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(
            command,
            env={**os.environ, **QUIET},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as process,
    ):
        try:
            yield Driven(process, log)
        finally:
            process.kill()
