"""Imports go one way: server to engine, and inside each from an upper layer to a lower."""

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
    frozenset({"draft.table", "progress"}),
    frozenset({"fault", "request", "figures", "config", "serving.pace"}),
    frozenset(
        {
            *("plan", "preparation", "summary"),
            *("serving.watchdog", "serving.recovery", "serving.admission", "serving.output_stream"),
        }
    ),
    frozenset({"scheduling", "kernels", "cache"}),
    frozenset({"text", "sampling"}),
    frozenset({"models", "request_state"}),
    frozenset({"draft", "verify", "accounting", "serving.isolation"}),
    frozenset({"serving.preparer", "serving.step_guard"}),
    frozenset({"request_table"}),
    frozenset({"core"}),
    frozenset({"build", "serving.engine_thread", "serving.request_workers"}),
    frozenset({"serving.async_engine", "bench", "doctor", "profile"}),
)
"""Modules and packages of the engine, lowest first."""

SERVER_LAYERS: tuple[dict[str, str], ...] = (
    {
        "": "limits version",
        "json_schema": "keywords patterns",
        "parsing": "call_arguments deltas tags",
        "observability": "http_counts private_traceback request_record start_summary",
        "apis.shared.schema": "base union",
        "apis.responses": "store",
    },
    {
        "json_schema": "disjoint numbers objects references",
        "parsing": "call_scanner reasoning",
        "observability": "load_progress logs prometheus tracing",
        "apis.shared.schema": "content error structured tools usage",
    },
    {
        "json_schema": "arrays closing",
        "parsing": "hermes json_blocks llama_json",
        "apis.shared.schema": "messages speculation",
    },
    {
        "json_schema": "prepare",
        "parsing": "answer",
        "apis.shared.schema": "sampling",
        "apis.responses": "items",
    },
    {
        "apis.chat": "schema",
        "apis.completions": "schema",
        "apis.messages": "schema",
        "apis.models": "schema",
        "apis.operation": "schema",
        "apis.responses": "schema",
        "apis.tokenize": "schema",
    },
    {"": "errors"},
    {"middleware": "api_keys head header_limit body_limit preflight response_start slashes"},
    {"middleware": "access_log auth catch_all not_enforced_header request_id"},
    {"middleware": "admission"},
    {"": "context"},
    {
        "apis.shared.http": "body_encoding disconnect json_response openapi",
        "apis.shared.grammar": "constraints schema_faults tool_calls",
        "apis.shared.prompt": "function_messages message_builder sampling speculation tools "
        "unsupported_fields",
        "apis.shared.render": "blocks head renderer tokens usage",
    },
    {
        "apis.shared.http": "json_route sse",
        "apis.shared.grammar": "prepare",
        "apis.shared.prompt": "conversation",
    },
    {"apis.shared.prompt": "prepared_prompt"},
    {"apis.shared": "generation", "apis.shared.prompt": "turn"},
    {"apis.chat": "old_functions", "apis.completions": "best_of", "apis.responses": "truncation"},
    {
        "apis.chat": "prompt render",
        "apis.completions": "prompt render",
        "apis.messages": "prompt render",
        "apis.responses": "prompt render",
        "apis.tokenize": "prompt render",
    },
    {"apis.shared": "respond", "apis.responses": "history"},
    {
        "apis.chat": "route",
        "apis.completions": "route",
        "apis.messages": "route",
        "apis.models": "route",
        "apis.operation": "health metrics speculation version",
        "apis.responses": "route",
        "apis.tokenize": "route",
    },
    {"": "app", "process": "drain http_protocol listener load_errors signals tls"},
    {"process": "uvicorn_config"},
    {"process": "metrics_server"},
    {"process": "serve"},
    {"cli": "bench_tables command"},
    {"cli": "machine profile"},
    {"cli": "bench cache doctor pull serve"},
    {"cli": "main"},
)
"""Files of the server by package, lowest first. None imports another one of its own layer."""

APIS = ("chat", "completions", "messages", "responses", "tokenize")
API_FILES = ("route", "schema", "prompt", "render")

SERVER_MAY_IMPORT = frozenset(
    {
        "engine.serving.async_engine",
        "engine.bench",
        "engine.profile",
        "engine.build",
        "engine.cache.errors",
        "engine.cache.location",
        "engine.cache.model_cache",
        "engine.config",
        "engine.doctor.advice",
        "engine.doctor.examine",
        "engine.doctor.machine",
        "engine.doctor.machine_advice",
        "engine.doctor.pair",
        "engine.figures",
        "engine.serving.pace",
        "engine.models.runner",
        "engine.models.source",
        "engine.progress",
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


def server_layers() -> dict[str, int]:
    return {
        ".".join(filter(None, ("server", package, name))): number
        for number, layer in enumerate(SERVER_LAYERS)
        for package, names in layer.items()
        for name in names.split()
    }


def not_downward(graph: Graph) -> list[tuple[str, str]]:
    """Imports in the server that don't go to a lower layer.

    Raises KeyError for a file that has no layer yet: give it one in SERVER_LAYERS.
    """
    layers = server_layers()
    return [
        (module, imported)
        for module, imports in graph.items()
        if not is_package(graph, module)
        for imported in imports & graph.keys()
        if not is_package(graph, imported)
        if layers[imported] >= layers[module]
    ]


def mixed(graph: Graph, one: str, other: str) -> list[tuple[str, str]]:
    """Modules of one kind that import one of another, directly or through others."""
    return [
        (module, imported)
        for module, imports in graph.items()
        if one in module.split(".")
        for imported in sorted(reachable(graph, imports) & graph.keys())
        if other in imported.split(".")
    ]


def imports_of_other_apis(graph: Graph) -> list[tuple[str, str]]:
    return [
        (module, imported)
        for module, imports in graph.items()
        if (own := api_of(module)) is not None
        for imported in imports & graph.keys()
        if api_of(imported) not in (None, own)
    ]


def api_of(module: str) -> str | None:
    """None: it is no API's own."""
    return next((api for api in APIS if module.startswith(f"server.apis.{api}.")), None)


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


@pytest.fixture(scope="module")
def server() -> Graph:
    return import_graph("server")


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


def test_the_check_of_the_server_sees_what_it_should() -> None:
    graph = {
        "server": frozenset[str](),
        "server.apis.chat.prompt": run_time_imports(
            "from server import errors\n"
            "def f():\n    from server.apis.chat.render import ChatRenderer\n"
            "    from server.apis.shared.prompt import tools"
        ),
        "server.apis.chat.render": run_time_imports("import server.apis.responses.prompt"),
        "server.apis.responses.prompt": frozenset[str](),
        "server.apis.shared.prompt.tools": run_time_imports("from server.errors import ApiError"),
        "server.errors": run_time_imports("from server.apis.shared.prompt.tools import x"),
    }
    assert not_downward(graph) == [
        ("server.apis.chat.prompt", "server.apis.chat.render"),
        ("server.apis.chat.render", "server.apis.responses.prompt"),
        ("server.errors", "server.apis.shared.prompt.tools"),
    ]
    assert cycles(graph) == ["server.apis.shared.prompt.tools", "server.errors"]
    assert mixed(graph, "prompt", "render") == [
        ("server.apis.chat.prompt", "server.apis.chat.render")
    ]
    assert imports_of_other_apis(graph) == [
        ("server.apis.chat.render", "server.apis.responses.prompt")
    ]
    with pytest.raises(KeyError, match="unplaced"):
        not_downward(
            {"server.unplaced": frozenset({"server.errors"}), "server.errors": frozenset()}
        )


def test_the_server_imports_downwards(server: Graph) -> None:
    assert not_downward(server) == []


def test_the_layers_of_the_server_are_its_files(server: Graph) -> None:
    files = [module for module in server if not is_package(server, module)]
    assert sorted(server_layers()) == sorted(files)
    packages = [server[module] for module in server if is_package(server, module)]
    assert not frozenset().union(*packages), "a package's own file imports nothing"


def test_the_server_has_no_import_cycle(server: Graph) -> None:
    assert cycles({name: imports for name, imports in server.items() if name != "server"}) == []


def test_every_api_has_the_same_four_files(server: Graph) -> None:
    wanted = {f"server.apis.{api}.{name}" for api in APIS for name in API_FILES}
    assert wanted - server.keys() == set()


def test_no_api_imports_another(server: Graph) -> None:
    assert imports_of_other_apis(server) == []


def test_input_conversion_and_rendering_are_apart(server: Graph) -> None:
    assert mixed(server, "prompt", "render") == []
    assert mixed(server, "render", "prompt") == []


def test_the_engine_imports_downwards(engine: Graph) -> None:
    assert len(engine) > 20
    assert upward_imports(engine) == []


def test_the_engine_has_no_import_cycle(engine: Graph) -> None:
    assert cycles({name: imports for name, imports in engine.items() if name != "engine"}) == []


def test_the_engine_knows_nothing_of_http(engine: Graph) -> None:
    roots = {module: {name.split(".")[0] for name in names} for module, names in engine.items()}
    assert {module: found for module in roots if (found := roots[module] & NOT_IN_ENGINE)} == {}


def test_the_server_sees_the_face_of_the_engine_only(engine: Graph, server: Graph) -> None:
    seen = {
        (module, imported)
        for module, imports in server.items()
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
