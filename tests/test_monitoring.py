"""Dashboard and alerts ask for metrics and labels that the server has."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.figures import DrafterMetrics
from server.observability.http_counts import HttpCounts
from server.observability.prometheus import make_registry
from tests.server.scripted_engine import ScriptedEngine

CONFIGS = Path(__file__).parent.parent / "configs"
DASHBOARD = CONFIGS / "grafana" / "dashboards" / "slipstream.json"
ALERTS = CONFIGS / "prometheus-alerts.yml"
OF_PROMETHEUS = {"up": {"instance", "job"}}
ADDED_BY_PROMETHEUS = {"instance", "job"}
METRIC = re.compile(r"\b((?:slipstream|process)_[a-z0-9_]+)\b(?:\{([^}]*)\})?")


@pytest.fixture(scope="module")
def labels() -> dict[str, set[str]]:
    """Labels of every sample that the server exposes, by its name."""
    engine = ScriptedEngine()
    engine.figures.drafters["ngram"] = DrafterMetrics(accepted_by_position=[1])
    counts = HttpCounts()
    counts.answered["GET", "/health", "200"] += 1
    found: dict[str, set[str]] = {}
    for family in make_registry(engine, counts, vllm_names=False).collect():
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found | OF_PROMETHEUS


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    values: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return values


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def dashboard_expressions(dashboard: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in panels(dashboard) for target in panel["targets"]]


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def asked_for(expression: str) -> Iterator[tuple[str, set[str]]]:
    for name, selector in METRIC.findall(expression):
        yield name, set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))


def test_every_metric_and_label_exists(labels, dashboard):
    expressions = dashboard_expressions(dashboard) + [rule["expr"] for rule in rules()]
    assert len(expressions) > 50
    for expression in expressions:
        metrics = list(asked_for(expression))
        assert metrics or expression.startswith("up{"), expression
        known = set(ADDED_BY_PROMETHEUS) | {"le"}
        for name, selected in metrics:
            assert name in labels, expression
            known |= labels[name]
            assert selected <= labels[name] | ADDED_BY_PROMETHEUS, expression
        grouped = re.findall(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)", expression)
        names = {label.strip() for group in grouped for label in group.split(",") if label.strip()}
        assert names <= known, expression


def test_the_check_would_see_a_wrong_name(labels):
    [(name, selected)] = asked_for('rate(slipstream_no_such_total{root="/"}[5m])')
    assert name not in labels
    assert selected == {"root"}


def test_the_dashboard_shows_what_operators_need(dashboard):
    titles = " / ".join(panel["title"] for panel in panels(dashboard))
    for wanted in (
        "Requests by status", "Time to first token", "KV blocks in use", "Prefix cache hits",
        "Acceptance by drafter", "Acceptance by position", "Tokens a pass", "Speed-up estimate",
    ):  # fmt: skip
        assert wanted in titles
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    placed = [panel["gridPos"] for panel in dashboard["panels"]]
    for number, one in enumerate(placed):
        assert one["x"] + one["w"] <= 24
        for other in placed[:number]:
            apart = (
                one["x"] >= other["x"] + other["w"]
                or other["x"] >= one["x"] + one["w"]
                or one["y"] >= other["y"] + other["h"]
                or other["y"] >= one["y"] + one["h"]
            )
            assert apart, (one, other)


def test_provisioning_fits_together(dashboard):
    provisioning = CONFIGS / "grafana" / "provisioning"
    [source] = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())[
        "datasources"
    ]
    used = {
        target["datasource"]["uid"] for panel in panels(dashboard) for target in panel["targets"]
    }
    assert used == {source["uid"]}
    [provider] = yaml.safe_load((provisioning / "dashboards" / "slipstream.yml").read_text())[
        "providers"
    ]
    mounts = yaml.safe_load((CONFIGS.parent / "docker-compose.yml").read_text())["services"][
        "grafana"
    ]["volumes"]
    inside = {mount.split(":")[1] for mount in mounts}
    assert provider["options"]["path"] in inside


def test_every_alert_says_what_is_wrong_and_how_urgent_it_is():
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    for rule in rules():
        assert rule["labels"]["severity"] in {"page", "ticket"}, rule["alert"]
        assert rule["annotations"]["summary"], rule["alert"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs Prometheus' promtool")
def test_promtool_accepts_configuration_alerts_and_dashboard(dashboard, tmp_path):
    # In a place of their own, the dashboard's queries as rules.
    records = [
        {
            "record": f"query:{number}",
            "expr": expression.replace("$__rate_interval", "1m").replace("$instance", ".+"),
        }
        for number, expression in enumerate(dashboard_expressions(dashboard))
    ]
    queries = tmp_path / "queries.yml"
    queries.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": records}]}))
    for command in (["config", CONFIGS / "prometheus.yml"], ["rules", queries]):
        checked = subprocess.run(["promtool", "check", *command], capture_output=True, text=True)
        assert checked.returncode == 0, checked.stderr
