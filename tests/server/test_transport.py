"""TLS, CORS, the metrics' own port, and what logs must not hold."""

from __future__ import annotations

import io
import logging
import shutil
import ssl
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from engine.config import Config, ConfigError
from engine.request import FinishReason
from server.app import create_app
from server.cli import serve
from server.cli.main import main
from server.middleware.catch_all import BrokenResponseError, CatchAllMiddleware
from server.observability.logs import configure_logging
from server.process.tls import check_certificate
from tests.server.live_server import live_server
from tests.server.scripted_engine import ScriptedEngine, Step, words
from tests.server.test_admission import KEYS, make_client
from tests.server.test_cli import Served

ORIGIN = "https://app.example"
BODY = {"model": "tiny/model", "prompt": "a"}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")
    make_certificate(folder / "cert.pem", folder / "key.pem")
    return folder / "cert.pem", folder / "key.pem"


def make_certificate(cert: Path, key: Path, *options: str) -> None:
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-keyout", str(key), "-out", str(cert), "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", *(options or ["-nodes"])]
    subprocess.run(command, check=True, capture_output=True)


class TestTls:
    def test_serves_https_only(self, certificate):
        cert, key = certificate
        config = Config(ssl_certfile=cert, ssl_keyfile=key)
        trusted = ssl.create_default_context(cafile=str(cert))
        with live_server(create_app(ScriptedEngine(), config), config) as url:
            secure = url.replace("http:", "https:")
            with httpx.Client(base_url=secure, verify=trusted) as http:
                answer = http.post("/v1/completions", json=BODY)
                assert answer.json()["choices"][0]["text"] == "Hello world!"
            with pytest.raises(httpx.TransportError):
                httpx.get(f"{url}/health", timeout=5)
            with pytest.raises(httpx.ConnectError, match=r"(?i)certificate"):
                httpx.get(f"{secure}/health")

    def test_old_protocols_are_refused(self, certificate):
        cert, key = certificate
        config = Config(ssl_certfile=cert, ssl_keyfile=key)
        old = ssl.create_default_context(cafile=str(cert))
        old.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        with (
            live_server(create_app(ScriptedEngine(), config), config) as url,
            pytest.raises(httpx.ConnectError),
        ):
            httpx.get(url.replace("http:", "https:"), verify=old)

    def test_the_process_says_https(self, certificate):
        cert, key = certificate
        with Served("--ssl-certfile", str(cert), "--ssl-keyfile", str(key)) as served:
            while "listening on https://127.0.0.1:" not in served.log:
                line = served.process.stderr.readline()
                assert line, served.log
                served.log += line

    def test_files_that_can_not_be_used(self, certificate, tmp_path):
        cert, key = certificate
        other = tmp_path / "other.pem"
        make_certificate(tmp_path / "cert.pem", other)
        locked = tmp_path / "locked.pem"
        make_certificate(tmp_path / "cert.pem", locked, "-passout", "pass:secret")
        text = tmp_path / "text"
        text.write_text("no certificate")
        for files, message in (
            ((cert, other), "ssl_keyfile: the key does not belong to ssl_certfile"),
            ((cert, locked), "ssl_keyfile: the key is encrypted"),
            ((text, key), f"ssl_certfile: {text} and {key}: no certificate"),
            ((cert, None), f"ssl_certfile: {cert}: no certificate with its key"),
        ):
            with pytest.raises(ConfigError) as raised:
                check_certificate(*files)
            assert str(raised.value).startswith(message)

    @pytest.mark.parametrize(
        ("flags", "code", "message"),
        [
            (["--ssl-certfile", "/no/c"], 1, "ssl_certfile: can't read /no/c: No such file"),
            (["--ssl-keyfile", "/no/k"], 2, "ssl_keyfile: needs ssl_certfile too"),
            (["--metrics.host", "256.0.0.1", "--metrics.port", "1"], 1, "can't listen on 256"),
            (["--cors.allow-origins", '["https://a.example/"]'], 2, "cors.allow_origins.0: "),
            (["--cors.allow-origins", '["*.example"]'], 2, "cors.allow_origins.0: "),
        ],
    )
    def test_start_errors_are_one_line(self, monkeypatch, capsys, flags, code, message):
        monkeypatch.setattr(serve, "configure_logging", lambda *arguments: None)
        monkeypatch.setattr(serve, "exit_on_stop_signals", lambda: None)
        assert main(["serve", "--port", "0", *flags]) == code
        error = capsys.readouterr().err
        assert error.startswith(f"slipstream: error: {message}")
        assert error.count("\n") == 1


class TestCors:
    async def test_off_by_default(self, client):
        headers = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}
        for method in ("GET", "OPTIONS"):
            response = await client.http.request(method, "/v1/models", headers=headers)
            assert not [name for name in response.headers if name.startswith("access-control")]

    @pytest.mark.parametrize("origins", [(ORIGIN,), ("*",)])
    async def test_allowed_origin(self, engine, origins):
        app = create_app(engine, Config(cors={"allow_origins": origins}), keys=KEYS)
        async with make_client(app) as http:
            asked = {
                "Origin": ORIGIN,
                "Access-Control-Request-Method": "POST",
                "Access-Control-Request-Headers": "authorization, content-type, x-stainless-os",
            }
            permission = await http.options("/v1/chat/completions", headers=asked)
            assert permission.status_code == 200
            assert permission.headers["access-control-allow-origin"] in (ORIGIN, "*")
            assert "authorization" in permission.headers["access-control-allow-headers"]
            for headers, status in (({}, 401), ({"x-api-key": "ben-key"}, 200)):
                answer = await http.get("/v1/models", headers={"Origin": ORIGIN, **headers})
                assert answer.status_code == status
                assert answer.headers["access-control-allow-origin"] in (ORIGIN, "*")
                assert "access-control-allow-credentials" not in answer.headers

    async def test_other_origins(self, engine):
        app = create_app(engine, Config(cors={"allow_origins": (ORIGIN,)}))
        async with make_client(app) as http:
            for origin in ("https://evil.example", f"{ORIGIN}.evil.example", "null"):
                answer = await http.get("/v1/models", headers={"Origin": origin})
                assert "access-control-allow-origin" not in answer.headers
                asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
                assert (await http.options("/v1/models", headers=asked)).status_code == 400


class TestMetricsPort:
    async def test_metrics_are_no_longer_with_the_rest(self, engine):
        app = create_app(engine, Config(metrics={"port": 9100}))
        async with make_client(app) as http:
            assert (await http.get("/metrics")).status_code == 404
            assert (await http.get("/v1/models")).status_code == 200

    def test_the_process_serves_them_without_keys(self, monkeypatch):
        monkeypatch.setenv("SLIPSTREAM_API_KEY", "sk-metrics-test")
        with Served("--metrics.port", "0") as served:
            url = served.read_url()
            while "metrics on http" not in served.log:
                served.log += served.process.stderr.readline()
            metrics_url = served.log.split("metrics on ")[1].split()[0]
            assert httpx.get(f"{url}/metrics", timeout=20).status_code == 401
            answer = httpx.get(metrics_url, timeout=20)
            assert "slipstream_engine_ready" in answer.text
            for path in ("/v1/models", "/docs", "/openapi.json", "/health"):
                assert httpx.get(metrics_url.replace("/metrics", path)).status_code == 404
            served.process.terminate()
            assert served.end() == 0
            assert "Traceback" not in served.log


PROMPT, KEY = "the-secret-prompt", "sk-the-secret-key"
NOTHING: dict[str, object] = {}


class TestLogs:
    @pytest.fixture
    def log(self, monkeypatch):
        """All that the process logs, as `serve` sets logging up."""
        root = logging.getLogger()
        before = root.handlers[:], root.level
        levels = {name: logging.getLogger(name).level for name in ("uvicorn", "httpx", "httpcore")}
        stderr = io.StringIO()
        monkeypatch.setattr(sys, "stderr", stderr)
        root.handlers.clear()  # or they would be closed, and pytest needs them
        configure_logging("info", "console")
        yield stderr.getvalue
        root.handlers[:], root.level = before
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)

    def test_no_prompt_no_key_no_address(self, log, monkeypatch):
        engine = ScriptedEngine()

        def script(request):
            match request.params.max_tokens:
                case 2:
                    return [*words("a", finish=None), Step([PROMPT], (b"x",), FinishReason.STOP)]
                case 3:
                    return [Step("", (), FinishReason.ERROR, error="It broke.")]
            return words("Hello", "!")

        engine.script = script
        headers = {"Authorization": f"Bearer {KEY}", "X-Forwarded-For": "203.0.113.9"}
        with live_server(create_app(engine, Config())) as url, httpx.Client(base_url=url) as http:
            for stream in (False, True):
                for fields in ({}, {"max_tokens": 2}, {"max_tokens": 3}, {"n": PROMPT}):
                    body = {"model": "tiny/model", "prompt": PROMPT, "stream": stream, **fields}
                    http.post("/v1/completions", json=body, headers=headers)
            http.post("/v1/completions", content=PROMPT, headers=headers)
            http.post("/v1/chat/completions", json={"model": PROMPT}, headers=headers)
            http.get(f"/v1/models/{PROMPT}?key={KEY}", headers=headers)
            http.get(f"/{PROMPT}", headers=headers)
            monkeypatch.setattr(engine, "submit", lambda *_: NOTHING[PROMPT])
            for stream in (False, True):
                body = {"model": "tiny/model", "prompt": PROMPT, "stream": stream}
                assert http.post("/v1/completions", json=body).status_code == 500
        text = log()
        assert "POST /v1/completions 200" in text
        assert "POST /v1/completions 500" in text
        assert "KeyError raised in" in text
        assert "test_transport.py" in text
        for secret in (PROMPT, KEY, "203.0.113.9", "127.0.0.1"):
            assert secret not in text

    async def test_response_that_breaks_after_it_has_begun(self, engine, caplog):
        async def broken(scope, receive, send):
            await send({"type": "http.response.start", "status": 200, "headers": []})
            raise LookupError(PROMPT)

        async def send(message):
            pass

        with pytest.raises(BrokenResponseError) as raised:
            await CatchAllMiddleware(broken)({"type": "http", "path": "/"}, None, send)
        assert raised.value.__suppress_context__
        assert "LookupError raised in" in caplog.text
        assert PROMPT not in caplog.text

    async def test_messages_of_exceptions_at_debug_level(self, client, engine, caplog):
        caplog.set_level(logging.DEBUG, "server.errors")
        engine.submit = lambda *_: NOTHING["why it broke"]
        assert (await client.complete()).status_code == 500
        assert "why it broke" in caplog.text

    async def test_causes_are_shown_too(self, client, engine, caplog):
        def submit(*_):
            try:
                raise OSError(PROMPT)
            except OSError as error:
                raise LookupError(PROMPT) from error

        engine.submit = submit
        await client.complete()
        assert "builtins.LookupError raised in" in caplog.text
        assert "builtins.OSError raised in" in caplog.text
        assert PROMPT not in caplog.text
