"""The Kubernetes example fits Kubernetes' schemas, itself and the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import kubernetes_validate
import pytest
import yaml

from engine.config import Config, load_config
from server.app import create_app
from server.cli.main import make_parser
from server.observability.http_counts import HttpCounts
from server.observability.prometheus import make_registry
from server.process.serve import SHUTDOWN_SECONDS
from tests.server.scripted_engine import ScriptedEngine

FOLDER = Path(__file__).parent.parent / "deploy" / "kubernetes"


@pytest.fixture(scope="module")
def objects() -> dict[str, dict[str, Any]]:
    """By kind."""
    text = (FOLDER / "slipstream.yaml").read_text(encoding="utf-8")
    found = list(yaml.safe_load_all(text))
    by_kind = {values["kind"]: values for values in found}
    assert len(by_kind) == len(found)
    return by_kind


@pytest.fixture
def container(objects: dict[str, dict[str, Any]]) -> dict[str, Any]:
    [container] = objects["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert isinstance(container, dict)
    return container


@pytest.fixture
def config(objects: dict[str, dict[str, Any]], tmp_path: Path) -> Config:
    path = tmp_path / "config.yaml"
    path.write_text(objects["ConfigMap"]["data"]["config.yaml"], encoding="utf-8")
    return load_config(path)


def test_every_object_fits_its_schema(objects):
    assert {"Deployment", "Service", "HorizontalPodAutoscaler"} <= set(objects)
    for values in objects.values():
        kubernetes_validate.validate(values, "1.37", strict=True)


def test_the_schema_check_sees_a_misspelt_field(objects):
    wrong = {**objects["Service"], "spec": {**objects["Service"]["spec"], "port": []}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.37", strict=True)


def test_names_and_labels_fit_together(objects, container):
    deployment = objects["Deployment"]
    pod = deployment["spec"]["template"]
    labels = pod["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == labels
    assert objects["Service"]["spec"]["selector"] == labels
    assert objects["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    target = objects["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", deployment["metadata"]["name"])
    [served] = objects["Service"]["spec"]["ports"]
    assert served["targetPort"] == container["ports"][0]["name"] == "http"
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
    assert volumes["config"]["configMap"]["name"] == objects["ConfigMap"]["metadata"]["name"]
    claim = volumes["models"]["persistentVolumeClaim"]["claimName"]
    assert claim == objects["PersistentVolumeClaim"]["metadata"]["name"]


def test_the_server_understands_its_configuration(container, config):
    arguments = make_parser().parse_args(container["args"])
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert str(arguments.config.parent) == mounts["config"]
    assert config.host == "0.0.0.0"
    assert [port["containerPort"] for port in container["ports"]] == [
        config.port,
        config.metrics.port,
    ]


def test_everything_runs_without_rights(objects, container):
    pod = objects["Deployment"]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_there_is_time_to_drain(objects, container, config):
    [_, wait] = container["lifecycle"]["preStop"]["exec"]["command"]
    pod = objects["Deployment"]["spec"]["template"]["spec"]
    needed = float(wait) + config.admission.drain_timeout + SHUTDOWN_SECONDS
    assert pod["terminationGracePeriodSeconds"] > needed


async def test_probes_ask_what_the_server_answers_without_a_key(container):
    engine = ScriptedEngine()
    transport = httpx.ASGITransport(app=create_app(engine, Config()))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            asked = container[probe]["httpGet"]
            assert asked["port"] == container["ports"][0]["name"]
            assert asked["path"].partition("?")[0] == "/health"
            assert (await http.get(asked["path"])).status_code == 200, probe


def test_prometheus_is_told_the_metrics_port(objects, config):
    notes = objects["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    assert notes["prometheus.io/scrape"] == "true"
    assert notes["prometheus.io/port"] == str(config.metrics.port)


def test_the_autoscaler_s_metric_exists(objects):
    [metric] = objects["HorizontalPodAutoscaler"]["spec"]["metrics"]
    name = metric["pods"]["metric"]["name"]
    registry = make_registry(ScriptedEngine(), HttpCounts(), vllm_names=False)
    assert registry.get_sample_value(name) == 0
    rules = yaml.safe_load((FOLDER / "prometheus-adapter.yaml").read_text(encoding="utf-8"))
    [rule] = rules["rules"]["custom"]
    assert rule["name"]["as"] == name
    assert rule["seriesQuery"].startswith(name + "{")
