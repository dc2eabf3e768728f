"""A short run of guidellm on each endpoint it can drive with text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conformance.clients import needs_client, run_client
from tests.e2e.served import Served

pytestmark = [pytest.mark.slow, pytest.mark.conformance, needs_client("guidellm")]

REQUESTS, OUTPUT_TOKENS = 12, 16


@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_short_run(tiny: Served, tiny_model_dir: Path, tmp_path: Path, endpoint: str) -> None:
    report = tmp_path / "report.json"
    run_client(
        "guidellm",
        *("run", "--disable-console", "--profile", "kind=concurrent,streams=3"),
        *("--backend", f"kind=openai_http,target={tiny.url},model=tiny,request_format={endpoint}"),
        *("--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--tokenizer", f"kind=huggingface_auto,model={tiny_model_dir}"),
        *("--data", f"kind=synthetic_text,prompt_tokens=48,output_tokens={OUTPUT_TOKENS}"),
        *("--output", f"kind=json,path={report}"),
        cwd=tmp_path,
    )
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    metrics = benchmark["metrics"]
    totals = metrics["request_totals"]
    assert totals["successful"] == REQUESTS
    assert totals["errored"] == totals["incomplete"] == 0
    output = metrics["output_token_count"]["successful"]
    assert output["min"] == output["max"] == OUTPUT_TOKENS
    assert metrics["time_to_first_token_ms"]["successful"]["min"] > 0
