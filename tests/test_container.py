"""The container files agree with each other and with the server; no container engine is needed."""

from __future__ import annotations

import fnmatch
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.config import load_config
from server.cli.main import make_parser
from server.process.serve import SHUTDOWN_SECONDS

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


def stages(dockerfile: list[tuple[str, str]]) -> dict[str, list[tuple[str, str]]]:
    """Instructions of each stage by its name, those of the stage it builds on first."""
    found: dict[str, list[tuple[str, str]]] = {}
    name = ""
    for keyword, argument in dockerfile:
        if keyword == "FROM":
            parent, _, name = argument.partition(" AS ")
            found[name] = list(found.get(parent, ()))
        elif name:
            found[name].append((keyword, argument))
    return found


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
    from server.apis.operation import metrics

    assert job["metrics_path"] in {getattr(route, "path", None) for route in metrics.router.routes}


def test_the_command_is_one_the_server_understands(dockerfile: list[tuple[str, str]]) -> None:
    assert json.loads(arguments(dockerfile, "ENTRYPOINT")[0]) == ["slipstream"]
    command = json.loads(arguments(dockerfile, "CMD")[-1])
    parsed = make_parser().parse_args(command)
    assert parsed.host == "0.0.0.0"
    assert (ROOT / parsed.config).is_file()


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_everything_runs_without_root(dockerfile: list[tuple[str, str]], target: str) -> None:
    stage = stages(dockerfile)[target]
    user = arguments(stage, "USER")[-1].split(":")[0]
    assert int(user) > 0
    assert any(f"--uid {user} " in run for run in arguments(stage, "RUN"))
    assert f"--from=build-{target} /opt/venv /opt/venv" in arguments(stage, "COPY")


def test_the_cpu_image_is_the_default_and_compiles_nothing_at_run_time(
    dockerfile: list[tuple[str, str]],
) -> None:
    by_name = stages(dockerfile)
    assert list(by_name)[-1] == "cpu"
    assert any("g++" in run for run in arguments(by_name["build-cpu"], "RUN"))
    assert not any("g++" in run for run in arguments(by_name["cpu"], "RUN"))


def test_nothing_is_written_outside_the_cache(
    dockerfile: list[tuple[str, str]], compose: dict[str, Any]
) -> None:
    environment = " ".join(arguments(stages(dockerfile)["cpu"], "ENV"))
    values = dict(re.findall(r"(\w+)=(\S+)", environment))
    for name in ("SLIPSTREAM_CACHE", "HF_HOME", "TMPDIR"):
        assert values[name].startswith("/cache")
    assert values["PYTHONDONTWRITEBYTECODE"] == "1"
    service = compose["services"]["slipstream"]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]


def test_what_the_image_sets_is_valid_configuration(
    dockerfile: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = " ".join(arguments(stages(dockerfile)["cpu"], "ENV"))
    for name, value in re.findall(r"(SLIPSTREAM_\w+)=(\S+)", environment):
        monkeypatch.setenv(name, value)
    assert load_config().log_format == "json"


def test_compose_leaves_time_to_drain(compose: dict[str, Any]) -> None:
    grace = compose["services"]["slipstream"]["stop_grace_period"]
    assert int(grace.removesuffix("s")) > load_config().admission.drain_timeout + SHUTDOWN_SECONDS


def test_prometheus_finds_its_alerts(compose: dict[str, Any]) -> None:
    [alerts] = read_yaml("configs/prometheus.yml")["rule_files"]
    mounts = compose["services"]["prometheus"]["volumes"]
    assert f"./configs/{alerts}:/etc/prometheus/{alerts}:ro" in mounts


def test_the_health_check_asks_the_health_route(dockerfile: list[tuple[str, str]]) -> None:
    from server.apis.operation import health

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
    assert {name for name, _ in dockerfile} >= {"FROM", "HEALTHCHECK", "VOLUME"}


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
            assert (ROOT / source).exists(), source
    [environment] = [env for env in arguments(dockerfile, "ENV") if "SLIPSTREAM_CACHE" in env]
    [cache] = re.findall(r"SLIPSTREAM_CACHE=(\S+)", environment)
    assert arguments(dockerfile, "VOLUME") == [cache]
    assert compose["services"]["slipstream"]["volumes"] == [f"model-cache:{cache}"]
