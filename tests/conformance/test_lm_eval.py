"""lm-eval's `local-completions` against its own `hf` model: same weights, same items."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.clients import needs_client, run_client
from tests.e2e.served import served

pytestmark = [
    pytest.mark.slow,
    pytest.mark.conformance,
    pytest.mark.timeout(600),
    needs_client("lm_eval"),
]

TASKS = Path(__file__).parent / "tasks"
CHOICE, ROLLING, GENERATE = "slipstream_choice", "slipstream_rolling", "slipstream_generate"
NOISE = 2e-3
"""Nats a continuation: two float32 evaluations that batch and add in another order."""


@dataclass(frozen=True)
class Evaluation:
    results: dict[str, dict[str, Any]]
    samples: dict[str, list[dict[str, Any]]]
    log: str

    def responses(self, task: str) -> list[Any]:
        """What the model said, item by item, request by request."""
        by_item = sorted(self.samples[task], key=lambda sample: sample["doc_id"])
        return [response for sample in by_item for response in sample["filtered_resps"]]

    def choice_scores(self) -> tuple[list[float], list[bool]]:
        """Log-likelihood of each choice of each item, and whether it is the greedy one."""
        pairs = self.responses(CHOICE)
        greedy = {"True": True, "False": False}
        return [float(score) for score, _ in pairs], [
            greedy[str(is_greedy)] for _, is_greedy in pairs
        ]


def evaluate(kind: str, output: Path, **model_args: object) -> Evaluation:
    arguments = ",".join(f"{key}={value}" for key, value in model_args.items())
    done = run_client(
        "lm_eval",
        *("--model", kind, "--model_args", arguments, "--device", "cpu"),
        *("--tasks", f"{CHOICE},{ROLLING},{GENERATE}", "--include_path", str(TASKS)),
        *("--output_path", str(output), "--log_samples"),
        cwd=TASKS,
    )
    (results,) = output.rglob("results_*.json")
    samples = {}
    for task in (CHOICE, ROLLING, GENERATE):
        (file,) = output.rglob(f"samples_{task}_*.jsonl")
        samples[task] = [json.loads(line) for line in file.read_text().split("\n") if line]
    return Evaluation(json.loads(results.read_text())["results"], samples, done.stderr)


@pytest.fixture(scope="module")
def direct(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Evaluation:
    output = tmp_path_factory.mktemp("direct")
    return evaluate("hf", output, pretrained=tiny_model_dir, dtype="float32")


@pytest.fixture(scope="module", params=["torch", "native"])
def through_server(
    request: pytest.FixtureRequest,
    tiny_model_dir: Path,
    tiny_draft_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Evaluation:
    flags = ["--model", str(tiny_model_dir), "--draft", str(tiny_draft_dir)]
    flags += ["--served-name", "tiny", "--kv.memory-mib", "16", "--kv.draft-memory-mib", "16"]
    flags += ["--runner", request.param, "--dtype", "float32", "--quantization", "none"]
    with served(*flags, "--threads", "1") as server:
        server.wait_until_ready()
        return evaluate(
            "local-completions",
            tmp_path_factory.mktemp("served"),
            model="tiny",
            base_url=f"{server.url}/v1/completions",
            tokenizer=tiny_model_dir,
            tokenizer_backend="huggingface",
            num_concurrent=4,
            max_retries=1,
            max_length=512,
        )


def test_every_request_succeeds(through_server: Evaluation) -> None:
    assert "API request failed" not in through_server.log
    assert "retry" not in through_server.log.lower()


def test_choices_score_the_same(direct: Evaluation, through_server: Evaluation) -> None:
    expected, expected_greedy = direct.choice_scores()
    scores, greedy = through_server.choice_scores()
    assert len(scores) == 80
    assert scores == pytest.approx(expected, abs=NOISE)
    assert greedy == expected_greedy
    assert 3 < sum(greedy) < 77
    accuracy = through_server.results[CHOICE]["acc,none"]
    assert accuracy == direct.results[CHOICE]["acc,none"]
    assert 0.25 < accuracy < 1


def test_texts_score_the_same(direct: Evaluation, through_server: Evaluation) -> None:
    expected = [float(score) for score in direct.responses(ROLLING)]
    scores = [float(score) for score in through_server.responses(ROLLING)]
    assert len(scores) == 20
    assert scores == pytest.approx(expected, abs=NOISE)


def test_generates_the_same(direct: Evaluation, through_server: Evaluation) -> None:
    texts = through_server.responses(GENERATE)
    assert texts == direct.responses(GENERATE)
    assert len(set(texts)) > 5
