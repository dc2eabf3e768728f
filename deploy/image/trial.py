"""Runs an image as a container engine would, and asks its health check."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from deploy.image.build import Image, package_sources
from deploy.image.sandbox import Container, Root, end, enter, inside, send, start
from engine.config import Config

_WAIT_SECONDS = 300
_END_SECONDS = 60

_FAULT = """
import pathlib, sys, threading, time

def wait_and_break():
    while not pathlib.Path("/cache/break").exists():
        time.sleep(0.2)
    def step(core):
        raise RuntimeError("broken on purpose")
    sys.modules["engine.core"].EngineCore.step = step

threading.Thread(target=wait_and_break, daemon=True).start()
"""
"""Breaks the engine once a file is there. Python imports a sitecustomize.py by itself."""

_ASK = """
import json, urllib.request
body = {"model": "x", "prompt": "Once upon a time", "max_tokens": 8}
names = json.load(urllib.request.urlopen("http://127.0.0.1:8000/v1/models", timeout=30))
body["model"] = names["data"][0]["id"]
request = urllib.request.Request("http://127.0.0.1:8000/v1/completions",
    json.dumps(body).encode(), {"Content-Type": "application/json"})
answer = json.load(urllib.request.urlopen(request, timeout=60))
assert answer["usage"]["completion_tokens"] > 0
"""

_STATE = """
import json, sys, urllib.error, urllib.request
try:
    answer = urllib.request.urlopen("http://127.0.0.1:8000/health", timeout=5)
except urllib.error.HTTPError as error:
    answer = error
sys.exit(0 if json.load(answer)["status"] == sys.argv[1] else 1)
"""

_WRITE = """
import pathlib, sys
for folder in ("/", "/app", "/opt/venv", "/tmp", "/etc", "/var/tmp"):
    try:
        (pathlib.Path(folder) / "written").touch()
    except OSError:
        continue
    sys.exit(1)
"""


class TrialError(Exception):
    """The image doesn't do what it should; says what."""


class Trial:
    """One image, with an empty volume."""

    def __init__(self, image: Image, work: Path, tell: Callable[[str], None]) -> None:
        self._image = image
        self._tell = tell
        self._work = work
        self._volume = _empty(work / "volume")
        user, _, group = image.user.partition(":")
        shutil.chown(self._volume, int(user), int(group))
        self._fault = _empty(work / "fault")
        (self._fault / "sitecustomize.py").write_text(_FAULT, encoding="utf-8")

    def run(self) -> None:
        """
        Raises:
            TrialError: something is not as it should be.
        """
        self._fetch_model()
        with self._serving({"SLIPSTREAM_RECOVERY__MAX_RESTARTS": "0"}) as server:
            self._expect_loading(server)
            self._expect_ready(server)
            self._expect(server, ["python3", "-c", _ASK], "an answer to a request")
            self._expect(server, ["python3", "-c", _WRITE], "nothing but the volume is writable")
            (self._volume / "break").touch()
            self._in(server, ["python3", "-c", _ASK])
            self._expect_dead(server)
        (self._volume / "break").unlink()
        with self._serving({}) as server:
            self._expect_ready(server)
            send(server, signal.SIGTERM)
            status = server.wait(_END_SECONDS)
            if status != 0:
                raise TrialError(f"exit status {status} after SIGTERM")
            self._tell("a second start with the same volume; SIGTERM ended it with exit status 0")

    def _fetch_model(self) -> None:
        """What the server would do at its first start, which has no network here."""
        sources, settings = package_sources()
        binds = {"/etc/resolv.conf": Path("/etc/resolv.conf").resolve(), **sources}
        command = ["slipstream", "pull", str(Config().model)]
        pull = start(self._root(binds), self._inner(command, settings), network=True)
        output, _ = pull.communicate()
        if pull.returncode != 0:
            raise TrialError(f"{' '.join(command)}: {output}")
        self._tell(f"pulled {output.split()[-1]} into the volume, as user {self._image.user}")

    @contextmanager
    def _serving(self, environment: Mapping[str, str]) -> Iterator[Container]:
        settings = {"PYTHONPATH": "/mnt/fault", **environment}
        command = [*self._image.entrypoint, *self._image.command]
        root = self._root({"/mnt/fault": self._fault})
        server = start(root, self._inner(command, settings), network=False)
        try:
            yield server
        except (TrialError, subprocess.TimeoutExpired) as error:
            raise TrialError(f"{error}\n{end(server)}") from error
        finally:
            end(server)

    def _expect_loading(self, server: Container) -> None:
        self._wait(server, lambda: self._state_is(server, "loading"), "loading")
        healthy = self._healthy(server)
        if healthy and not self._state_is(server, "ok"):
            raise TrialError("the health check passes while the model loads")
        if healthy:
            raise TrialError("the model was loaded before the health check was asked")
        self._tell("loading: the health check fails, the process runs")

    def _expect_ready(self, server: Container) -> None:
        self._wait(server, lambda: self._healthy(server), "healthy")
        self._tell("ready: the health check passes")

    def _expect_dead(self, server: Container) -> None:
        self._wait(server, lambda: self._state_is(server, "dead"), "dead")
        if self._healthy(server):
            raise TrialError("the health check passes although the engine is dead")
        self._tell("dead: the engine was broken on purpose, the health check fails")

    def _wait(self, server: Container, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _WAIT_SECONDS
        while not condition():
            if server.poll() is not None:
                raise TrialError(f"it ended before it was {what}, exit status {server.returncode}")
            if time.monotonic() > deadline:
                raise TrialError(f"it was not {what} in {_WAIT_SECONDS} s")
            time.sleep(0.1)

    def _expect(self, server: Container, command: Sequence[str], what: str) -> None:
        if self._in(server, command) != 0:
            raise TrialError(f"expected: {what}")
        self._tell(what)

    def _state_is(self, server: Container, state: str) -> bool:
        return self._in(server, ["python3", "-S", "-c", _STATE, state]) == 0

    def _healthy(self, server: Container) -> bool:
        return self._in(server, self._image.health_check, self._image.health_seconds) == 0

    def _in(self, server: Container, command: Sequence[str], seconds: float = 60) -> int:
        return enter(server, self._inner(command, {}), seconds)

    def _root(self, binds: Mapping[str, Path]) -> Root:
        volumes = dict.fromkeys(self._image.volumes, self._volume)
        return Root(self._image.layers, self._work / "mount", binds={**volumes, **binds})

    def _inner(self, command: Sequence[str], environment: Mapping[str, str]) -> list[str]:
        return inside(
            self._work / "mount",
            command,
            {"HOME": self._image.volumes[0], **self._image.environment, **environment},
            user=self._image.user,
            workdir=self._image.workdir,
            unprivileged=True,
        )


def _empty(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder
