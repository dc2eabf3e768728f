"""The documentation builds, agrees with the code, and its examples work."""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from engine.config import Config
from engine.figures import DrafterMetrics
from server.app import create_app
from server.cli.main import make_parser
from server.observability.http_counts import HttpCounts
from server.observability.prometheus import make_registry
from tests.server.scripted_engine import ScriptedEngine

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TEXTS = [
    *PAGES,
    *(ROOT / name for name in ("README.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md")),
]
SHELL = re.compile(r"```sh\n(.*?)```", re.DOTALL)
CURL = re.compile(r"curl (?:-N )?localhost:8000(/\S+) -H \S+ \S+ -d '(.*?)'", re.DOTALL)


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def test_generated_parts_are_up_to_date(generator):
    assert [path.name for path in generator.stale_pages()] == [], "run: make docs"
    texts = "".join(path.read_text(encoding="utf-8") for path in PAGES)
    assert set(re.findall(r"<!-- generated: (\w+) -->", texts)) == set(generator.PARTS)


def test_a_page_that_lags_behind_is_noticed(generator):
    lagging = page("metrics").replace("slipstream_engine_ready", "slipstream_engine_is_ready", 1)
    assert generator.render(lagging) == page("metrics")


def keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from keys(field.annotation, f"{name}.")
        else:
            yield prefix + name


def test_every_configuration_key_is_described():
    described = re.findall(r"^\| `([a-z_.]+)` \|.*\| (.+) \|$", page("configuration"), re.MULTILINE)
    assert [key for key, _ in described if "." not in key]
    assert sorted(key for key, _ in described) == sorted(keys(Config))
    assert all(meaning.strip() for _, meaning in described)


def test_the_table_of_metrics_is_that_of_the_registry():
    engine = ScriptedEngine()
    engine.figures.drafters["ngram"] = DrafterMetrics(accepted_by_position=[1])
    counts = HttpCounts()
    counts.answered["GET", "/health", "200"] += 1
    registry = make_registry(engine, counts, vllm_names=False)
    exposed = {
        re.sub(r"_(bucket|sum|count)$", "", sample.name) if family.type == "histogram"
        else sample.name
        for family in registry.collect()
        for sample in family.samples
        if sample.name.startswith("slipstream_")
    }  # fmt: skip
    described = re.findall(r"^\| `(slipstream_\w+)` \|", page("metrics"), re.MULTILINE)
    assert sorted(described) == sorted(exposed)


def test_every_alert_is_explained():
    alerts = (ROOT / "configs" / "prometheus-alerts.yml").read_text(encoding="utf-8")
    for name in re.findall(r"alert: (\w+)", alerts):
        assert f"`{name}`" in page("operations"), name


def test_metrics_and_configuration_keys_in_the_text_exist(generator):
    metrics = set(re.findall(r"slipstream_\w+", generator.metrics()))
    known = set(keys(Config))
    sections = {key.partition(".")[0] for key in known if "." in key}
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        named = {
            re.sub(r"_(bucket|sum|count)$", "", n) for n in re.findall(r"slipstream_\w+", text)
        }
        assert named <= metrics, path.name
        for key in re.findall(r"`([a-z_]+\.[a-z_]+)(?:: \w+)?`", text):
            if key.partition(".")[0] in sections:
                assert key in known, (path.name, key)


def commands() -> list[tuple[str, list[str]]]:
    return [
        (path.name, shlex.split(line, comments=True)[1:])
        for path in [*PAGES, ROOT / "README.md"]
        for block in SHELL.findall(path.read_text(encoding="utf-8"))
        for line in block.splitlines()
        if re.match(r"(\.venv/bin/)?slipstream ", line)
    ]


def test_commands_are_understood():
    found = commands()
    assert len(found) > 6
    for name, words in found:
        try:
            make_parser().parse_args(words)
        except SystemExit:
            pytest.fail(f"{name}: slipstream {' '.join(words)}")


def requests() -> list[tuple[str, str, dict[str, Any]]]:
    return [
        (path.name, route, json.loads(body))
        for path in [*PAGES, ROOT / "README.md"]
        for route, body in CURL.findall(path.read_text(encoding="utf-8"))
    ]


async def test_example_requests_are_answered():
    assert len(requests()) >= 5
    transport = httpx.ASGITransport(app=create_app(ScriptedEngine(), Config()))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        for name, route, body in requests():
            response = await http.post(route, json={**body, "model": "tiny/model"})
            assert response.status_code == 200, (name, response.text)


SPAN = re.compile(r"`([^`\n]+)`")
IN_FOLDER = re.compile(r"(?:\w+=)?([a-z.]\w*(?:/[\w.-]+)+/?|[a-z]\w*/)")
FILE_NAME = re.compile(r"[\w.-]+\.(?:cpp|h|md|py|toml|txt|yaml|yml)|Dockerfile|Makefile")
NOT_OURS = (".venv/", "build/", "application/")
"""What is made, or is no path."""
NOT_SOURCE = {".git", ".venv", "build"}


@functools.cache
def file_names() -> frozenset[str]:
    """Of all files there are, wherever they are."""
    folders = [p for p in ROOT.iterdir() if p.is_dir() and p.name not in NOT_SOURCE]
    files = [p for folder in folders for p in folder.rglob("*")] + list(ROOT.iterdir())
    return frozenset(path.name for path in files)


def stale_references(text: str) -> list[str]:
    """Files and folders of the repository, and what is in them, that a text names wrongly.

    A word in backticks is such a name when it is a path, or a file of some kind that only the
    repository has. ``PATH::NAME`` is a class, a function or a constant, with dots or colons
    between it and what holds it.
    """
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    words = [word for span in SPAN.findall(prose) for word in span.split()]
    return [word for word in words if is_stale(*word.partition("::")[::2])]


def is_stale(name: str, inner: str) -> bool:
    match = IN_FOLDER.fullmatch(name)
    if match is None:
        return FILE_NAME.fullmatch(name) is not None and name not in file_names()
    if match[1].startswith(NOT_OURS):
        return False
    path = ROOT / match[1]
    return not path.exists() or (bool(inner) and not defines(path, re.split(r"::|\.", inner)))


def defines(path: Path, names: Iterable[str]) -> bool:
    node: ast.AST | None = ast.parse(path.read_text(encoding="utf-8"))
    for name in names:
        node = next((child for child in getattr(node, "body", ()) if binds(child, name)), None)
    return node is not None


def binds(statement: ast.stmt, name: str) -> bool:
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return statement.name == name
        case ast.AnnAssign(target=ast.Name(id=target)):
            return target == name
        case ast.Assign(targets=targets):
            return any(isinstance(target, ast.Name) and target.id == name for target in targets)
    return False


def test_a_stale_reference_is_found() -> None:
    there = "`engine/core.py::EngineCore.step` `engine/draft/table.py::DRAFTERS` `.venv/bin/pip` "
    there += "`tests/e2e` `docs/` `make X=configs/default.yaml` `/v1/models` `core.py` `ORG/NAME`"
    assert stale_references(there) == []
    for gone in (
        "engine/gone.py", "engine/gone/", "gone/", "config/default.yaml", "gone.py",
        "engine/core.py::Gone", "engine/core.py::EngineCore.gone", "engine/gone.py::EngineCore",
    ):  # fmt: skip
        assert stale_references(f"See `{gone}`.") == [gone]


@pytest.mark.parametrize("path", TEXTS, ids=[path.name for path in TEXTS])
def test_files_that_the_text_names_exist(path: Path) -> None:
    assert stale_references(path.read_text(encoding="utf-8")) == []


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r": (\w+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
    assert sorted(listed) == [path.name for path in PAGES]


def test_the_site_builds_strictly_and_fetches_nothing(tmp_path):
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) >= len(PAGES)
    assert not list(tmp_path.rglob("*.py"))
    for html in pages:
        text = html.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe)\b[^>]*\bsrc=[\"']?([^\"'\s>]+)", text)
        loaded += re.findall(
            r"<link\b[^>]*\brel=[\"']?stylesheet[^>]*href=[\"']?([^\"'\s>]+)", text
        )
        assert loaded
        assert not [url for url in loaded if re.match(r"(https?:)?//", url)], html.name
