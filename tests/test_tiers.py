"""`make test` stays short, `make test-all` leaves nothing out, and the CI runs both."""

from __future__ import annotations

import ast
import shutil
import subprocess
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parent
REAL_CLIENT = TESTS / "e2e" / "test_openai_client.py"
"""The one test of whole processes that is in the short run."""
LONG = [
    *(path for path in TESTS.glob("e2e/test_*.py") if path != REAL_CLIENT),
    *TESTS.glob("real/test_*.py"),
    *TESTS.glob("conformance/test_*.py"),
    TESTS / "speculation" / "test_distribution.py",
]
LONG_ONES = "slow or real or conformance"


def marks(path: Path) -> set[str]:
    """Marks that a file gives to all of its tests."""
    marks: set[str] = set()
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "pytestmark":
            names = (node for node in ast.walk(statement) if isinstance(node, ast.Attribute))
            marks.update(node.attr for node in names)
    return marks


def pytest_commands(target: str) -> list[str]:
    made = subprocess.run(
        ["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [line for line in made.stdout.splitlines() if "pytest --numprocesses" in line]


@pytest.mark.parametrize("path", LONG, ids=lambda path: path.relative_to(TESTS).as_posix())
def test_long_tests_are_marked(path: Path) -> None:
    assert marks(path) & set(LONG_ONES.split(" or "))


def test_the_real_client_is_in_the_short_run() -> None:
    assert not marks(REAL_CLIENT)


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
class TestTargets:
    def test_test_runs_what_is_not_marked(self) -> None:
        (command,) = pytest_commands("test")
        assert f'-m "not ({LONG_ONES})"' in command
        assert "--cov" not in command
        assert "--durations=20" in command

    def test_test_all_runs_all_and_measures_coverage(self) -> None:
        short, long = pytest_commands("test-all")
        assert f'-m "not ({LONG_ONES})"' in short
        assert "--cov " in short
        assert f'-m "{LONG_ONES}"' in long
        assert "FUZZ_INPUTS=" in long
        assert all("--durations=20" in command for command in (short, long))

    def test_test_all_looks_for_faults_of_memory_too(self) -> None:
        made = subprocess.run(
            ["make", "--dry-run", "test-all"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert "ASAN_OPTIONS=" in made.stdout
        assert "tests/kernels" in made.stdout


def test_the_ci_runs_both() -> None:
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert lines[-2:] == ["make test", "make test-all"]
