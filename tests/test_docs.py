"""The documentation builds, agrees with the code, and its examples work."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
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
from server.middleware.access_log import HttpCounts
from server.observability.prometheus import make_registry
from tests.server.scripted_engine import ScriptedEngine

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
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
