from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path

import pytest

from engine.cache.model_cache import Kind, ModelCache, cache_key
from server.cli.main import main

MIB = 1 << 20


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(folder))
    monkeypatch.setenv("COLUMNS", "120")
    return folder


def write_mib(count: int, folder: Path) -> None:
    (folder / "x").write_bytes(bytes(count * MIB))


@pytest.fixture
def filled(root: Path) -> Path:
    entries: list[tuple[Kind, str, int]] = [
        ("packed", "qwen-fast", 3), ("models", "smollm2-1", 2), ("converted", "qwen-folder", 1),
    ]  # fmt: skip
    for used_at, (kind, label, mib) in enumerate(entries, 1_700_000_000):
        ModelCache(root, float("inf")).folder(
            kind,
            label,
            cache_key(label),
            partial(write_mib, mib),
        )
        [folder] = (root / kind).iterdir()
        os.utime(folder, (used_at, used_at))
    (root / "digests").mkdir()
    return root


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(["cache", *arguments]) == 0
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines() if line.strip()]


def test_an_empty_cache_is_no_error(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, "ls") == [f"0.00 GiB of at most 64 GiB in {root}"]
    assert told(capsys, "prune") == ["freed 0.00 GiB, kept 0.00 GiB, 0 of 0 in use"]
    assert not root.exists()


def test_ls_names_what_is_there_and_what_is_used(
    filled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    user = ModelCache(filled, float("inf"))
    user.folder("models", "", cache_key("smollm2-1"), lambda folder: None)
    lines = told(capsys, "ls")
    rows = [line.split(" ", 3) for line in lines if re.match("packed|models|converted", line)]
    assert [row[:3] for row in rows] == [
        ["packed", "qwen-fast", "3.0"],
        ["converted", "qwen-folder", "1.0"],
        ["models", "smollm2-1", "2.0"],
    ]
    assert [row[3].endswith("yes") for row in rows] == [False, False, True]
    assert all(re.match(r"20\d\d-\d\d-\d\d \d\d:\d\d", row[3]) for row in rows)
    assert lines[-1].startswith("0.01 GiB of at most 64 GiB in ")


def test_prune_keeps_to_the_bound(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, "prune") == ["freed 0.00 GiB, kept 0.01 GiB, 0 of 3 in use"]
    assert told(capsys, "prune", "--max-gib", str(3 / 1024))[0] == "deleted packed qwen-fast"
    assert told(capsys, "prune", "--max-gib", str(2 / 1024)) == [
        "deleted models smollm2-1",
        "freed 0.00 GiB, kept 0.00 GiB, 0 of 1 in use",
    ]
    assert (filled / "digests").exists()


def test_prune_takes_the_bound_of_the_environment(
    filled: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE_MAX_GIB", str(3 / 1024))
    assert told(capsys, "prune")[0] == "deleted packed qwen-fast"


def test_prune_all_spares_only_what_is_used(
    filled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    user = ModelCache(filled, float("inf"))
    folder = user.folder("models", "", cache_key("smollm2-1"), lambda folder: None)
    assert told(capsys, "prune", "--all") == [
        "deleted packed qwen-fast",
        "deleted converted qwen-folder",
        "freed 0.00 GiB, kept 0.00 GiB, 1 of 1 in use",
    ]
    assert (folder / "x").exists()
    assert not (filled / "digests").exists()


@pytest.mark.parametrize("value", ["x", "-1", "nan", "inf"])
def test_prune_refuses_other_bounds(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["cache", "prune", f"--max-gib={value}"])
    assert f"--max-gib: must be a number of GiB, 0 or more (got '{value}')" in (
        capsys.readouterr().err
    )


def test_a_cache_that_can_not_be_read_is_one_line(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root.write_text("in the way")
    assert main(["cache", "ls"]) == 1
    message = capsys.readouterr().err
    assert message.startswith("slipstream: error: ")
    assert str(root) in message
    assert message.count("\n") == 1
