"""schemathesis makes requests of /openapi.json, right and wrong, and checks every answer by it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conformance.clients import needs_client, run_client
from tests.e2e.served import Served

pytestmark = [
    pytest.mark.slow,
    pytest.mark.conformance,
    pytest.mark.timeout(900),
    needs_client("schemathesis"),
]

HOOKS = "tests.conformance.schemathesis_hooks"
NUM_EXAMPLES = 30
"""Of each operation, beside those that cover the schema's every corner."""
MIN_CASES = 2_000
REACHED = ("/v1/completions", "/v1/responses", "/v1/messages", "/tokenize", "/detokenize")
ROOT = Path(__file__).parent.parent.parent
NOT_PROMISED = "positive_data_acceptance"
"""A schema can't tell the served model's name, its context and what fields exclude each other."""


def test_every_answer_is_as_documented(tiny: Served, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    arguments = ["run", f"{tiny.url}/openapi.json", "--checks", "all"]
    arguments += ["--exclude-checks", NOT_PROMISED, "--max-examples", str(NUM_EXAMPLES)]
    arguments += ["--seed", "1", "--no-shrink", "--continue-on-failure"]
    arguments += ["--report", "json", "--report-json-path", str(report)]
    environment = {"SCHEMATHESIS_HOOKS": HOOKS, "PYTHONPATH": str(ROOT)}
    run_client("schemathesis.cli", *arguments, cwd=tmp_path, env=environment, timeout=800)
    summary = json.loads(report.read_text())
    assert summary["complete"]
    assert summary["operations"]["tested"] == summary["operations"]["total"] >= 15
    cases = summary["test_cases"]
    assert cases["generated"] > MIN_CASES
    assert (cases["with_failures"], cases["errored"]) == (0, 0)
    assert not {f"POST {path}" for path in REACHED} & set(summary["warnings"]["missing_test_data"])
    assert tiny.metric("slipstream_num_requests_running") == 0
    assert tiny.metric("slipstream_kv_cache_usage_perc") == 0
