"""SECURITY.md names tests that exist and limits with their true defaults."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from engine.config import LimitsConfig

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
FILES = {path.name: path for path in (ROOT / "tests").rglob("test_*.py")}
UNITS = {"": 1, " KiB": 1 << 10, " MiB": 1 << 20}


def guards() -> list[tuple[str, str]]:
    """File and test of every guard; a guard without a file is in that of the one before it."""
    found = []
    for line in TEXT.splitlines():
        file = ""
        for name in re.findall(r"`((?:tests/|test_|Test)[\w/.:]+)`", line):
            head, *rest = name.split("::")
            if head.endswith(".py") or head.startswith("tests/"):
                file = head.rsplit("/", 1)[-1].removesuffix(".py") + ".py"
            else:
                rest = [head, *rest]
            found.append((file, "::".join(rest)))
    return found


def test_every_guard_exists() -> None:
    assert len(guards()) > 30
    for file, name in guards():
        source = FILES[file].read_text(encoding="utf-8")
        for part in filter(None, name.split("::")):
            assert re.search(rf"^\s*(?:async )?(?:def|class) {part}\b", source, re.MULTILINE), (
                file,
                name,
            )


def test_paths_are_right() -> None:
    for path in re.findall(r"`(tests/[\w/]+\.py)", TEXT):
        assert (ROOT / path).is_file(), path


@pytest.mark.parametrize("name", LimitsConfig.model_fields)
def test_limits_are_those_of_the_configuration(name: str) -> None:
    (row,) = re.findall(rf"^\| `{name}` \| (\d+)( KiB| MiB)? \|", TEXT, re.MULTILINE)
    assert int(row[0]) * UNITS[row[1]] == LimitsConfig.model_fields[name].default
