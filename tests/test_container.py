"""The container files agree with each other and with the server; no container engine is needed."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.image.dockerfile import Dockerfile, Instruction, pairs
from engine.config import load_config
from server.cli.main import make_parser
from server.process.serve import SHUTDOWN_SECONDS

ROOT = Path(__file__).parent.parent


def read_yaml(name: str) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))
    return values


@pytest.fixture(scope="module")
def dockerfile() -> Dockerfile:
    return Dockerfile.read(ROOT / "Dockerfile")


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return read_yaml("docker-compose.yml")


def values(instructions: Iterable[Instruction], keyword: str) -> list[str]:
    return [instruction.value for instruction in instructions if instruction.keyword == keyword]


def variables(instructions: Iterable[Instruction]) -> dict[str, str]:
    """What ENV sets."""
    return {
        name: value for line in values(instructions, "ENV") for name, value in pairs(line).items()
    }


def test_prometheus_scrapes_the_port_the_server_listens_on(
    dockerfile: Dockerfile, compose: dict[str, Any]
) -> None:
    [job] = read_yaml("configs/prometheus.yml")["scrape_configs"]
    [target] = job["static_configs"][0]["targets"]
    host, port = target.split(":")
    assert host in compose["services"]
    assert values(dockerfile.lineage("cpu"), "EXPOSE") == [port]
    command = json.loads(values(dockerfile.lineage("cpu"), "CMD")[-1])
    assert command[command.index("--port") + 1] == port
    assert compose["services"][host]["ports"][0].endswith(f":{port}")
    from server.apis.operation import metrics

    assert job["metrics_path"] in {getattr(route, "path", None) for route in metrics.router.routes}


def test_the_command_is_one_the_server_understands(dockerfile: Dockerfile) -> None:
    assert json.loads(values(dockerfile.lineage("cpu"), "ENTRYPOINT")[0]) == ["slipstream"]
    command = json.loads(values(dockerfile.lineage("cpu"), "CMD")[-1])
    parsed = make_parser().parse_args(command)
    assert parsed.host == "0.0.0.0"
    assert (ROOT / parsed.config).is_file()


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_everything_runs_without_root(dockerfile: Dockerfile, target: str) -> None:
    stage = dockerfile.lineage(target)
    user = values(stage, "USER")[-1].split(":")[0]
    assert int(user) > 0
    assert any(f"--uid {user} " in run for run in values(stage, "RUN"))
    assert f"--from=build-{target} /opt/venv /opt/venv" in values(stage, "COPY")


def test_the_cpu_image_is_the_default_and_compiles_nothing_at_run_time(
    dockerfile: Dockerfile,
) -> None:
    assert list(dockerfile.stages)[-1] == "cpu"
    assert any("g++" in run for run in values(dockerfile.lineage("build-cpu"), "RUN"))
    assert not any("g++" in run for run in values(dockerfile.lineage("cpu"), "RUN"))


def test_nothing_is_written_outside_the_cache(
    dockerfile: Dockerfile, compose: dict[str, Any]
) -> None:
    environment = variables(dockerfile.lineage("cpu"))
    for name in ("SLIPSTREAM_CACHE", "HF_HOME", "TMPDIR"):
        assert environment[name].startswith("/cache")
    assert environment["PYTHONDONTWRITEBYTECODE"] == "1"
    service = compose["services"]["slipstream"]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]


def test_what_the_image_sets_is_valid_configuration(
    dockerfile: Dockerfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables(dockerfile.lineage("cpu")).items():
        if name.startswith("SLIPSTREAM_"):
            monkeypatch.setenv(name, value)
    assert load_config().log_format == "json"


def test_compose_leaves_time_to_drain(compose: dict[str, Any]) -> None:
    grace = compose["services"]["slipstream"]["stop_grace_period"]
    assert int(grace.removesuffix("s")) > load_config().admission.drain_timeout + SHUTDOWN_SECONDS


def test_prometheus_finds_its_alerts(compose: dict[str, Any]) -> None:
    [alerts] = read_yaml("configs/prometheus.yml")["rule_files"]
    mounts = compose["services"]["prometheus"]["volumes"]
    assert f"./configs/{alerts}:/etc/prometheus/{alerts}:ro" in mounts


def test_the_health_check_asks_the_health_route(dockerfile: Dockerfile) -> None:
    from server.apis.operation import health

    [check] = values(dockerfile.lineage("cpu"), "HEALTHCHECK")
    [path] = re.findall(r"127\.0\.0\.1:8000(/\w+)", check)
    assert path in {getattr(route, "path", None) for route in health.router.routes}


def test_what_is_copied_is_there_and_not_ignored(dockerfile: Dockerfile) -> None:
    rules = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    allowed = [rule[1:] for rule in rules if rule.startswith("!")]
    copied = {
        source
        for stage in dockerfile.stages
        for copy in values(dockerfile.lineage(stage), "COPY")
        if not copy.startswith("--from")
        for source in copy.split()[:-1]
    }
    assert {"engine", "server", "configs", "pyproject.toml"} <= copied
    for source in copied:
        assert (ROOT / source).exists(), source
        assert any(fnmatch.fnmatch(source, rule) for rule in allowed), source
    assert copied == set(allowed)


def test_volumes_are_declared_and_mounted_where_they_are_used(
    dockerfile: Dockerfile, compose: dict[str, Any]
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
    cache = variables(dockerfile.lineage("cpu"))["SLIPSTREAM_CACHE"]
    assert values(dockerfile.lineage("cpu"), "VOLUME") == [cache]
    assert compose["services"]["slipstream"]["volumes"] == [f"model-cache:{cache}"]
