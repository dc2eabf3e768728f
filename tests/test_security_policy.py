"""SECURITY.md names tests that run and assert something, and limits with their true defaults."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
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


Function = ast.FunctionDef | ast.AsyncFunctionDef
NOT_RUN = ("skip", "skipif", "xfail")
CHECKS = ("raises", "warns", "fail")
"""Functions of pytest that fail a test by themselves."""


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def definition(node: ast.AST, name: str) -> ast.AST | None:
    """What a module or a class defines under a name; of several, as in Python, the last."""
    found = [
        child
        for child in ast.iter_child_nodes(node)
        if isinstance(child, Function | ast.ClassDef) and child.name == name
    ]
    return found[-1] if found else None


def guard(file: str, name: str) -> ast.AST:
    """The module, class or function that a guard names.

    Raises:
        LookupError: there is none.
    """
    found: ast.AST | None = tree(FILES[file])
    for part in filter(None, name.split("::")):
        found = None if found is None else definition(found, part)
    if found is None:
        raise LookupError(f"{file}::{name}")
    return found


def run_for(node: ast.AST) -> Iterator[Function]:
    """The tests that pytest runs for a guard; none where it would not collect it."""
    if isinstance(node, Function):
        if node.name.startswith("test_") and not is_left_out(node):
            yield node
    elif isinstance(node, ast.Module) or (
        isinstance(node, ast.ClassDef) and node.name.startswith("Test") and not is_left_out(node)
    ):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Function | ast.ClassDef):
                yield from run_for(child)


def is_left_out(node: Function | ast.ClassDef) -> bool:
    return any(
        isinstance(part, ast.Attribute) and part.attr in NOT_RUN
        for decorator in node.decorator_list
        for part in ast.walk(decorator)
    )


def asserts(node: ast.AST, module: ast.Module, seen: frozenset[str] = frozenset()) -> bool:
    """Whether code can fail by what it finds, itself or in a function that it calls."""
    for part in ast.walk(node):
        if isinstance(part, ast.Assert):
            return True
        if not isinstance(part, ast.Call):
            continue
        name = ast.unparse(part.func).rpartition(".")[2]
        if name in CHECKS or name.startswith("assert_"):
            return True
        helper = None if name in seen else known(name, module)
        if helper is not None and asserts(helper[0], helper[1], seen | {name}):
            return True
    return False


def known(name: str, module: ast.Module) -> tuple[ast.AST, ast.Module] | None:
    """A function or class of a test module, or one that it has from another."""
    found = definition(module, name)
    if found is not None:
        return found, module
    for statement in module.body:
        if not isinstance(statement, ast.ImportFrom) or statement.module is None:
            continue
        path = (ROOT / statement.module.replace(".", "/")).with_suffix(".py")
        names = {alias.asname or alias.name: alias.name for alias in statement.names}
        if statement.module.startswith("tests.") and name in names and path.is_file():
            found = definition(tree(path), names[name])
            return None if found is None else (found, tree(path))
    return None


def faults(file: str, name: str) -> list[str]:
    """What is wrong with a guard."""
    outer = name.rpartition("::")[0]
    try:
        tests = list(run_for(guard(file, name)))
        is_reached = not outer or any(run_for(guard(file, outer)))
    except LookupError:
        return [f"{file}::{name} does not exist"]
    if not tests or not is_reached:
        return [f"{file}::{name} is never run"]
    module = tree(FILES[file])
    return [f"{file}::{t.name} asserts nothing" for t in tests if not asserts(t, module)]


def test_every_guard_runs_and_asserts_something() -> None:
    assert len(guards()) > 30
    assert [fault for file, name in guards() for fault in faults(file, name)] == []


SOURCE = """
import pytest
from tests.structured.engines import alone

def check(x):
    assert x

class TestGood:
    def test_asserts(self): assert 1
    def test_calls(self): check(1)
    async def test_raises(self):
        with pytest.raises(ValueError): pass

class TestBad:
    def test_nothing(self): print(1)

class Other:
    def test_never_run(self): assert 1

@pytest.mark.skip
def test_skipped(): assert 1

@pytest.mark.parametrize("x", [1])
def test_suppresses(x):
    with suppress(ValueError): int(x)

def test_twice(): assert 1
def test_twice(): pass
"""


def test_a_guard_that_could_not_fail_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "test_it.py"
    path.write_text(SOURCE, encoding="utf-8")
    monkeypatch.setitem(FILES, path.name, path)
    for name in ("TestGood", "TestGood::test_calls"):
        assert faults(path.name, name) == []
    for name in ("TestBad", "TestBad::test_nothing", "test_suppresses", "test_twice"):
        assert faults(path.name, name)[0].endswith("asserts nothing"), name
    for name in ("Other", "Other::test_never_run", "test_skipped"):
        assert faults(path.name, name) == [f"test_it.py::{name} is never run"]
    for name in ("TestGood::test_gone", "test_gone"):
        assert faults(path.name, name) == [f"test_it.py::{name} does not exist"]
    assert len(faults(path.name, "")) == 3


def test_paths_are_right() -> None:
    for path in re.findall(r"`(tests/[\w/]+\.py)", TEXT):
        assert (ROOT / path).is_file(), path


@pytest.mark.parametrize("name", LimitsConfig.model_fields)
def test_limits_are_those_of_the_configuration(name: str) -> None:
    (row,) = re.findall(rf"^\| `{name}` \| (\d+)( KiB| MiB)? \|", TEXT, re.MULTILINE)
    assert int(row[0]) * UNITS[row[1]] == LimitsConfig.model_fields[name].default
