"""The command line, run as a process."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest

from server.cli.main import main, make_parser
from server.process.listener import listen

SCRIPTED_SERVER = """
import asyncio, sys
import server.process.serve
from engine.serving.async_engine import EngineState
from server.cli.main import main
from tests.server.scripted_engine import ScriptedEngine

class LoadingEngine(ScriptedEngine):
    async def start(self):
        await asyncio.sleep({load_seconds})
        {load}
        await super().start()

server.process.serve.make_engine = lambda config: LoadingEngine(state=EngineState.LOADING{options})
sys.exit(main())
"""


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "server.cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "COLUMNS": "100", **environment},
    )


def exit_code_of(arguments):
    try:
        return main(arguments)
    except SystemExit as end:
        return end.code


class Served:
    """`slipstream serve` with a scripted engine in place of a model."""

    def __init__(self, *flags, load_seconds=0.0, load="pass", options=""):
        program = SCRIPTED_SERVER.format(load_seconds=load_seconds, load=load, options=options)
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, "serve", "--port", "0", *flags],
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log = ""

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.process.kill()
        self.process.communicate()

    def read_url(self):
        while (match := re.search(r"listening on (http://\S+),", self.log)) is None:
            line = self.process.stderr.readline()
            assert line, self.log
            self.log += line
        return match[1]

    def end(self, timeout=20):
        _, rest = self.process.communicate(timeout=timeout)
        self.log += rest
        return self.process.returncode


def test_help_is_quick_and_names_the_commands():
    started = time.monotonic()
    result = run("--help")
    assert time.monotonic() - started < 3
    assert result.returncode == 0
    assert "serve" in result.stdout
    assert "pull" in result.stdout


def test_serve_help_explains_every_key():
    result = run("serve", "--help")
    assert result.returncode == 0
    for flag in (
        "--config FILE", "--model", "--draft", "--port", "--max-context", "--kv.block-size",
        "--scheduler.max-running", "--speculation.draft-length", "--limits.max-body-bytes",
        "--metrics.vllm-names",
    ):  # fmt: skip
        assert flag in result.stdout
    assert "tokens in one KV block (default: 32)" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["serve", "--port", "abc"], {}, "port: "),
        (["serve", "--port", "70000"], {}, "port: "),
        (["serve", "--device", "tpu"], {}, "device"),
        (["serve", "--kv.block-size", "0"], {}, "kv.block_size: "),
        (["serve", "--no-such-flag"], {}, "--no-such-flag"),
        (["serve", "--config", "/nowhere/config.yaml"], {}, "/nowhere/config.yaml: No such file"),
        (["serve"], {"SLIPSTREAM_PORT": "x"}, "port: "),
        (["serve"], {"SLIPSTREAM_KV__BLOCK_SIZE": "-1"}, "kv.block_size: "),
        (["fly"], {}, "fly"),
        ([], {}, "COMMAND"),
    ],
)
def test_usage_and_configuration_errors_are_one_line(
    capsys, monkeypatch, arguments, environment, message
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert exit_code_of(arguments) == 2
    written = capsys.readouterr()
    assert message in written.err
    assert written.err.count("\n") == 1
    assert written.err.startswith("slipstream")
    assert written.out == ""


def test_error_in_the_configuration_file_names_the_key(tmp_path, capsys):
    path = tmp_path / "config.yaml"
    path.write_text("kv:\n  block_sise: 4\n")
    assert exit_code_of(["serve", "--config", str(path)]) == 2
    message = "slipstream: error: kv.block_sise: unknown configuration key\n"
    assert capsys.readouterr().err == message


def test_configuration_error_ends_the_process():
    result = run("serve", SLIPSTREAM_PORT="x")
    assert result.returncode == 2
    assert result.stderr.startswith("slipstream: error: port: ")
    assert result.stderr.count("\n") == 1


def test_busy_port_is_one_line():
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        result = run("serve", "--port", str(port))
    assert result.returncode == 1
    assert result.stderr == (
        f"slipstream: error: can't listen on 127.0.0.1:{port}: Address already in use\n"
    )


def test_unknown_host_is_one_line():
    result = run("serve", "--host", "no.such.host.invalid")
    assert result.returncode == 1
    assert "can't listen on no.such.host.invalid:8000" in result.stderr
    assert result.stderr.count("\n") == 1


def test_pull_reports_what_it_can_not_find():
    result = run("pull", "/nowhere/model.gguf")
    assert result.returncode == 1
    assert result.stderr.startswith("slipstream: error: /nowhere/model.gguf")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("stop_signal", [signal.SIGTERM, signal.SIGINT])
def test_serve_answers_while_loading_and_stops_cleanly(stop_signal):
    with Served(load_seconds=0.5) as served:
        url = served.read_url()
        response = httpx.get(f"{url}/health", timeout=20)
        assert (response.status_code, response.json()) == (503, {"status": "loading"})
        deadline = time.monotonic() + 10
        while httpx.get(f"{url}/health").status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        body = {"model": "tiny/model", "prompt": "a"}
        response = httpx.post(f"{url}/v1/completions", json=body)
        assert response.json()["choices"][0]["text"] == "Hello world!"
        served.process.send_signal(stop_signal)
        assert served.end() == 0
        assert "tiny/model is ready on " + url in served.log
        assert "Traceback" not in served.log


def test_stop_signal_ends_a_load():
    with Served(load_seconds=60) as served:
        url = served.read_url()
        assert httpx.get(f"{url}/health", timeout=20).status_code == 503
        started = time.monotonic()
        served.process.send_signal(signal.SIGTERM)
        assert served.end() == 0
        assert time.monotonic() - started < 5
        assert "Traceback" not in served.log


def test_request_in_progress_may_finish_after_a_stop_signal():
    with Served(options=", pace=0.2") as served:
        url = served.read_url()
        with httpx.stream(
            "POST",
            f"{url}/v1/completions",
            json={"model": "tiny/model", "prompt": "a", "stream": True},
            timeout=20,
        ) as response:
            lines = response.iter_lines()
            assert "Hello" in next(lines)
            served.process.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert rest[-2] == "data: [DONE]"
        assert served.end() == 0


def test_request_that_outlasts_the_drain_time_ends_in_an_error():
    with Served("--admission.drain-timeout", "0.2", options=", hold_after=1") as served:
        url = served.read_url()
        with httpx.stream(
            "POST",
            f"{url}/v1/completions",
            json={"model": "tiny/model", "prompt": "a", "stream": True},
            timeout=20,
        ) as response:
            lines = response.iter_lines()
            assert "Hello" in next(lines)
            served.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert len(rest) == 1
        assert "The server is shutting down." in rest[0]
        assert served.end() == 0
        assert "Traceback" not in served.log


@pytest.mark.parametrize(
    ("load", "message", "code"),
    [
        ('raise RuntimeError("a\\nb")', "can't load the model: RuntimeError: a b", 1),
        (
            'from engine.models.source import ModelSourceError; raise ModelSourceError("no file")',
            "can't load the model: no file",
            1,
        ),
        (
            'from engine.config import ConfigError; raise ConfigError("max_context: too long")',
            "max_context: too long",
            2,
        ),
    ],
)
def test_failed_load_is_one_line(load, message, code):
    with Served("--log-level", "warning", load=load) as served:
        assert served.end() == code
        assert served.log == f"slipstream: error: {message}\n"


def test_failed_load_has_a_traceback_at_debug_level():
    with Served("--log-level", "debug", load='raise RuntimeError("it broke")') as served:
        assert served.end() == 1
        assert "Traceback" in served.log
        assert served.log.endswith("can't load the model: RuntimeError: it broke\n")


def test_listening_socket_takes_ipv6():
    if not socket.has_ipv6:
        pytest.skip("no IPv6 on this machine")
    try:
        listener = listen("::1", 0)
    except OSError as error:
        pytest.skip(f"no IPv6 on this machine: {error}")
    with listener:
        assert listener.family == socket.AF_INET6


def test_default_prompts_of_bench_and_doctor_are_there():
    parser = make_parser()
    assert parser.parse_args(["bench"]).suite.is_file()
    assert parser.parse_args(["doctor"]).prompts.is_file()
