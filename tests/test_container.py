"""The container files agree with each other and with the server; no container engine is needed."""

from __future__ import annotations

import fnmatch
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from server.cli import make_parser

ROOT = Path(__file__).parent.parent


def read_yaml(name: str) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))
    return values


@pytest.fixture(scope="module")
def dockerfile() -> list[tuple[str, str]]:
    """Instructions and their arguments, continuation lines joined."""
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    instructions = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    return [(keyword, argument.strip()) for keyword, argument in instructions if keyword.isupper()]


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return read_yaml("docker-compose.yml")


def arguments(dockerfile: list[tuple[str, str]], keyword: str) -> list[str]:
    return [argument for name, argument in dockerfile if name == keyword]


def test_prometheus_scrapes_the_port_the_server_listens_on(
    dockerfile: list[tuple[str, str]], compose: dict[str, Any]
) -> None:
    [job] = read_yaml("configs/prometheus.yml")["scrape_configs"]
    [target] = job["static_configs"][0]["targets"]
    host, port = target.split(":")
    assert host in compose["services"]
    assert arguments(dockerfile, "EXPOSE") == [port]
    command = json.loads(arguments(dockerfile, "CMD")[-1])
    assert command[command.index("--port") + 1] == port
    assert compose["services"][host]["ports"][0].endswith(f":{port}")
    from server.routes import metrics

    assert job["metrics_path"] in {getattr(route, "path", None) for route in metrics.router.routes}


def test_the_command_is_one_the_server_understands(dockerfile: list[tuple[str, str]]) -> None:
    assert json.loads(arguments(dockerfile, "ENTRYPOINT")[0]) == ["slipstream"]
    command = json.loads(arguments(dockerfile, "CMD")[-1])
    parsed = make_parser().parse_args(command)
    assert parsed.host == "0.0.0.0"
    assert (ROOT / parsed.config).is_file()


def test_everything_runs_without_root(dockerfile: list[tuple[str, str]]) -> None:
    last_stage = [index for index, (keyword, _) in enumerate(dockerfile) if keyword == "FROM"][-1]
    user = arguments(dockerfile[last_stage:], "USER")[-1].split(":")[0]
    assert int(user) > 0
    assert any(f"--uid {user} " in run for run in arguments(dockerfile[last_stage:], "RUN"))


def test_the_health_check_asks_the_health_route(dockerfile: list[tuple[str, str]]) -> None:
    from server.routes import health

    [check] = arguments(dockerfile, "HEALTHCHECK")
    [path] = re.findall(r"127\.0\.0\.1:8000(/\w+)", check)
    assert path in {getattr(route, "path", None) for route in health.router.routes}


def test_what_is_copied_is_there_and_not_ignored(dockerfile: list[tuple[str, str]]) -> None:
    rules = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    allowed = [rule[1:] for rule in rules if rule.startswith("!")]
    copied = {
        source
        for copy in arguments(dockerfile, "COPY")
        if not copy.startswith("--from")
        for source in copy.split()[:-1]
    }
    assert {"engine", "server", "configs", "pyproject.toml"} <= copied
    for source in copied:
        assert (ROOT / source).exists(), source
        assert any(fnmatch.fnmatch(source, rule) for rule in allowed), source
    assert copied == set(allowed)


def test_volumes_are_declared_and_mounted_where_they_are_used(
    dockerfile: list[tuple[str, str]], compose: dict[str, Any]
) -> None:
    mounts = [
        mount.split(":")
        for service in compose["services"].values()
        for mount in service.get("volumes", [])
    ]
    named = {source for source, *_ in mounts if not source.startswith(".")}
    assert named == set(compose["volumes"])
    for source, *_ in mounts:
        if source.startswith("."):
            assert (ROOT / source).is_file()
    [environment] = [env for env in arguments(dockerfile, "ENV") if "SLIPSTREAM_CACHE" in env]
    [cache] = re.findall(r"SLIPSTREAM_CACHE=(\S+)", environment)
    assert arguments(dockerfile, "VOLUME") == [cache]
    assert compose["services"]["slipstream"]["volumes"] == [f"model-cache:{cache}"]
