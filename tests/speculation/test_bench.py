"""`slipstream bench`: what it decodes, and the figures it prints and writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.kernels import bench, native_available
from server.cli.main import main

CATEGORIES = ("edit", "tell")

needs_native = pytest.mark.skipif(
    native_available() is not None, reason="the native kernels are not built"
)


@pytest.fixture(autouse=True)
def _little_memory_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_BANDWIDTH_BYTES", 1 << 20)


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    entries = [
        {"category": "edit", "turns": ["Copy this:\n```\nthe cat eats\n```\nand no more."]},
        {"category": "tell", "prompt": "the cat eats"},
        {"category": "tell", "prompt": "my sister"},
    ]
    path = tmp_path / "suite.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


@pytest.fixture
def eighty_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables have little room, and packed weights a cache of their own."""
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")


def run_bench(*flags: str, suite: Path, model: Path, kv: str = "16") -> tuple[int, Any]:
    """The exit code and the figures that were written."""
    out = suite.with_name("out.json")
    flags = ("--suite", str(suite), "--json", str(out), "--threads", "1", *flags)
    code = main(["bench", "--model", str(model), "--kv.memory-mib", kv, *flags])
    return code, json.loads(out.read_text()) if out.exists() else None


def test_one_in_flight_counts_by_drafter_and_category(
    suite: Path, tiny_model_dir: Path, tiny_draft_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--draft", str(tiny_draft_dir), "--kv.draft-memory-mib", "16", "--predict-code"]
    flags += [
        "--concurrency",
        "1",
        "--max-tokens",
        "9",
        "--speculation.drafters",
        "predicted,ngram",
    ]
    code, figures = run_bench(*flags, suite=suite, model=tiny_model_dir)
    assert code == 0
    printed = capsys.readouterr().out
    assert "passes (medians)" in printed
    assert "Decoding, 1 in flight" in printed
    for entry in figures["passes"]:
        assert entry["step_ratios"]["1"] == 1.0
        assert set(entry["step_ms"]) == {"1", "2", "4", "8", "16", "32"}
        assert entry["prefill_tokens_per_s"] > 0
    by_name = {(e["drafters"], e["category"]): e for e in figures["decoding"]}
    drafters = {name for name, _ in by_name}
    assert {"plain", "predicted", "ngram", "all"} <= drafters
    assert len(by_name) == len(drafters) * 3
    for name in drafters:
        assert [by_name[name, c]["requests"] for c in (*CATEGORIES, "all")] == [1, 2, 3]
        assert by_name[name, "all"]["tokens"] == 3 * (9 - 1), "the prefill gives the first"
    assert by_name["plain", "all"]["tokens_per_pass"] == 1.0


def test_several_in_flight_count_together(suite: Path, tiny_model_dir: Path) -> None:
    flags = ["--concurrency", "2", "--max-tokens", "9", "--speculation.drafters", "ngram"]
    code, figures = run_bench(*flags, suite=suite, model=tiny_model_dir)
    assert code == 0
    assert [entry["drafters"] for entry in figures["decoding"]] == ["plain", "ngram"]
    for entry in figures["decoding"]:
        assert (entry["category"], entry["concurrency"]) == ("all", 2)
        assert (entry["requests"], entry["tokens"]) == (3, 3 * 9)
    assert figures["decoding"][0]["tokens_per_pass"] == 1.0, "of the passes of one request"


def test_limit_and_category_choose_prompts(suite: Path, tiny_model_dir: Path) -> None:
    flags = ["--concurrency", "1", "--max-tokens", "2", "--speculation.drafters", "ngram"]
    _, figures = run_bench(
        *flags, "--category", "tell", "--limit", "1", suite=suite, model=tiny_model_dir
    )
    assert {(e["category"], e["requests"]) for e in figures["decoding"]} == {
        ("tell", 1), ("all", 1),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--category", "verse"], "no prompts of category 'verse'"),
        (["--suite", "missing.jsonl"], "missing.jsonl"),
    ],
)
def test_nothing_to_decode_is_one_line(
    flags: list[str],
    message: str,
    suite: Path,
    tiny_model_dir: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, figures = run_bench(*flags, suite=suite, model=tiny_model_dir)
    assert (code, figures) == (1, None)
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


@needs_native
@pytest.mark.usefixtures("eighty_columns")
def test_kernels_are_timed_by_layer_shape(
    suite: Path,
    tiny_model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(bench, "_TIMED_BYTES", 1 << 16)
    flags = ["--kernel", "--rows", "1,8", "--runner", "native"]
    code, report = run_bench(*flags, suite=suite, model=tiny_model_dir)
    assert code == 0
    printed = capsys.readouterr().out
    assert "Linear layers" in printed
    assert "…" not in printed, "every figure can be read in 80 columns"
    assert report["threads"] == 1
    assert report["read_gigabytes_per_second"] > 0
    shapes = {(s["outputs"], s["inputs"]) for s in report["shapes"]}
    assert (64, 128) in shapes, "down_proj"
    for shape in report["shapes"]:
        assert [time["rows"] for time in shape["times"]] == [1, 8]
        assert all(time["gigabytes_per_second"] > 0 for time in shape["times"])


@needs_native
@pytest.mark.usefixtures("eighty_columns")
def test_contexts_are_measured_beside_the_memory(
    suite: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--context", "8,70", "--runner", "native"]
    code, report = run_bench(*flags, suite=suite, model=tiny_model_dir)
    assert code == 0
    assert "…" not in capsys.readouterr().out
    assert [entry["context"] for entry in report["contexts"]] == [8, 70]
    for entry in report["contexts"]:
        assert min(entry["prefill_tokens_per_s"], entry["decode_ms"]) > 0
        assert entry["read_gigabytes_per_s"] > 0


def test_a_context_without_room_is_refused_in_one_line(
    suite: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = run_bench("--context", "1000000", suite=suite, model=tiny_model_dir)
    assert (code, report) == (1, None)
    error = capsys.readouterr().err
    assert "--context" in error
    assert len(error.splitlines()) == 1


@needs_native
@pytest.mark.usefixtures("eighty_columns")
def test_the_parts_of_a_pass_are_profiled(
    suite: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = run_bench("--profile", "--runner", "native", suite=suite, model=tiny_model_dir)
    assert code == 0
    assert "…" not in capsys.readouterr().out
    assert [profile["rows"] for profile in report["profiles"]] == [1, 8, 16, 32]
    for profile in report["profiles"]:
        by_part = {part["part"]: part for part in profile["parts"]}
        assert {"attention", "qkv", "gate_up", "head"} <= by_part.keys()
        assert by_part["head"]["weight_megabytes"] > 0
        assert by_part["attention"]["milliseconds"] > 0


def test_without_native_models_there_is_no_profile(
    suite: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = run_bench("--profile", "--runner", "torch", suite=suite, model=tiny_model_dir)
    assert (code, report) == (1, None)
    assert "--profile" in capsys.readouterr().err
