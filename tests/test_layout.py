"""Imports go one way: server to engine, and inside the engine from an upper layer to a lower."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAX_LINES = 450

LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"draft.table"}),
    frozenset({"fault", "request", "figures", "config", "serving.pace"}),
    frozenset(
        {
            *("plan", "preparation", "summary"),
            *("serving.watchdog", "serving.recovery", "serving.admission"),
        }
    ),
    frozenset({"scheduling", "kernels", "cache"}),
    frozenset({"text", "sampling"}),
    frozenset({"models"}),
    frozenset({"draft", "verify", "serving.isolation"}),
    frozenset({"serving.preparer"}),
    frozenset({"core"}),
    frozenset({"build", "serving.engine_thread", "serving.request_workers"}),
    frozenset({"serving.async_engine", "bench", "doctor"}),
)
"""Modules and packages of the engine, lowest first."""

SERVER_MAY_IMPORT = frozenset(
    {
        "engine.serving.async_engine",
        "engine.bench",
        "engine.build",
        "engine.cache.errors",
        "engine.cache.location",
        "engine.cache.model_cache",
        "engine.config",
        "engine.doctor.advice",
        "engine.doctor.examine",
        "engine.doctor.pair",
        "engine.figures",
        "engine.serving.pace",
        "engine.models.runner",
        "engine.models.source",
        "engine.request",
        "engine.summary",
    }
)
NOT_IN_ENGINE = frozenset({"server", "loadtest", "fastapi", "starlette", "prometheus_client"})
TORCH_FREE = ("request", "plan", "config", "scheduling.scheduler", "serving.admission")
HEAVY = frozenset({"torch", "transformers"})

Graph = Mapping[str, frozenset[str]]
"""What each module imports when it runs, full names."""


def run_time_imports(source: str) -> frozenset[str]:
    """Everything a module imports, also inside functions, but not for type checkers only."""
    return frozenset(_imports(ast.parse(source)))


def _imports(node: ast.AST) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute"
            assert child.module is not None
            yield child.module
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        yield from _imports(child)


def import_graph(*packages: str) -> Graph:
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): (
            run_time_imports(path.read_text(encoding="utf-8"))
        )
        for package in packages
        for path in sorted((ROOT / package).rglob("*.py"))
    }


def part_of(module: str) -> str:
    """The entry of LAYERS that a module of the engine falls under.

    Raises KeyError for one that has no layer yet: give it one in LAYERS.
    """
    _, package, *inner = module.split(".")
    for part in (".".join([package, *inner[:1]]), package):
        if any(part in parts for parts in LAYERS):
            return part
    raise KeyError(module)


def layer_of(module: str) -> int:
    part = part_of(module)
    return next(layer for layer, parts in enumerate(LAYERS) if part in parts)


def upward_imports(graph: Graph) -> list[tuple[str, str]]:
    """Imports in the engine that don't go to a lower layer or stay in their own package."""
    return [
        (module, imported)
        for module, imports in graph.items()
        for imported in imports & graph.keys()
        if module != "engine" and imported.startswith("engine.")
        if not is_package(graph, module) and not is_package(graph, imported)
        if part_of(module) != part_of(imported)
        if layer_of(imported) >= layer_of(module)
    ]


def is_package(graph: Graph, module: str) -> bool:
    """Whether it is a package, whose own file must be empty then where layers split it."""
    return any(other.startswith(f"{module}.") for other in graph)


def cycles(graph: Graph) -> list[str]:
    """Modules that import themselves through others."""
    return [module for module in graph if module in reachable(graph, graph[module])]


def reachable(graph: Graph, start: frozenset[str]) -> set[str]:
    """Modules imported directly or through others; a module brings the packages it lies in."""
    found: set[str] = set()
    pending = list(start)
    while pending:
        module = pending.pop()
        if module not in found:
            found.add(module)
            pending.extend(graph.get(module, ()))
            parent = module.rpartition(".")[0]
            if parent:
                pending.append(parent)
    return found


@pytest.fixture(scope="module")
def engine() -> Graph:
    return import_graph("engine")


def test_the_check_sees_what_it_should() -> None:
    graph = {
        "engine.plan": run_time_imports("def f():\n    from engine import core"),
        "engine.core": run_time_imports(
            "from typing import TYPE_CHECKING\nimport engine.plan\n"
            "if TYPE_CHECKING:\n    from engine.build import x"
        ),
        "engine.build": run_time_imports("from engine.core import EngineCore"),
    }
    assert upward_imports(graph) == [("engine.plan", "engine.core")]
    assert cycles(graph) == ["engine.plan", "engine.core"]
    assert "engine.core.EngineCore" in reachable(graph, graph["engine.build"])


def test_the_engine_imports_downwards(engine: Graph) -> None:
    assert len(engine) > 20
    assert upward_imports(engine) == []


def test_the_engine_has_no_import_cycle(engine: Graph) -> None:
    assert cycles({name: imports for name, imports in engine.items() if name != "engine"}) == []


def test_the_engine_knows_nothing_of_http(engine: Graph) -> None:
    roots = {module: {name.split(".")[0] for name in names} for module, names in engine.items()}
    assert {module: found for module in roots if (found := roots[module] & NOT_IN_ENGINE)} == {}


def test_the_server_sees_the_face_of_the_engine_only(engine: Graph) -> None:
    seen = {
        (module, imported)
        for module, imports in import_graph("server").items()
        for imported in imports & engine.keys()
    }
    assert seen, "the server uses the engine"
    assert {pair for pair in seen if pair[1] not in SERVER_MAY_IMPORT} == set()


def test_the_load_generator_stands_alone() -> None:
    roots = {name.split(".")[0] for names in import_graph("loadtest").values() for name in names}
    assert not roots & {"engine", "server"}


@pytest.mark.parametrize("module", TORCH_FREE)
def test_scheduling_needs_no_torch(engine: Graph, module: str) -> None:
    found = reachable(engine, frozenset({f"engine.{module}"}))
    assert not {name.split(".")[0] for name in found} & HEAVY


def test_scheduling_loads_no_torch() -> None:
    names = ", ".join(f"engine.{module}" for module in TORCH_FREE)
    script = f"import sys, {names}; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert not HEAVY & set(loaded.stdout.split())


def test_no_file_is_too_long_to_have_one_responsibility() -> None:
    lengths = {
        path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for package in ("engine", "server")
        for path in (ROOT / package).rglob("*")
        if path.suffix in {".py", ".cpp", ".h"}
    }
    assert lengths
    assert {path: lines for path, lines in lengths.items() if lines > MAX_LINES} == {}
