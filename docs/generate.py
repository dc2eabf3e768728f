"""Writes the parts of these pages that follow from the code: configuration, API fields, metrics.

    python docs/generate.py            write them into the pages
    python docs/generate.py --check    exit with 1 if a page is not up to date

A part stands between ``<!-- generated: NAME -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent))

from prometheus_client.metrics_core import Metric  # noqa: E402

from engine.config import Config  # noqa: E402
from engine.draft.table import DRAFTERS, DrafterEntry  # noqa: E402
from engine.figures import DrafterMetrics, EngineMetrics  # noqa: E402
from engine.request import NO_ADVICE  # noqa: E402
from engine.serving.async_engine import AsyncEngine, EngineState  # noqa: E402
from engine.summary import EngineSummary, ModelSummary  # noqa: E402
from server.apis.shared.prompt import unsupported_fields  # noqa: E402
from server.app import create_app  # noqa: E402
from server.observability.http_counts import HttpCounts  # noqa: E402
from server.observability.prometheus import make_registry  # noqa: E402

PART = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
REQUESTS = {
    "ChatRequest": "/v1/chat/completions",
    "CompletionRequest": "/v1/completions",
    "ResponsesRequest": "/v1/responses",
    "MessagesRequest": "/v1/messages",
}
UNSUPPORTED = {
    "/v1/chat/completions": unsupported_fields.UNSUPPORTED_CHAT,
    "/v1/completions": unsupported_fields.UNSUPPORTED_COMPLETION,
    "/v1/responses": unsupported_fields.UNSUPPORTED_RESPONSES,
    "/v1/messages": unsupported_fields.UNSUPPORTED_MESSAGES,
}

Schema = Mapping[str, Any]


class IdleEngine:
    """The face of an engine that has loaded a model and had nothing to do."""

    state = EngineState.READY
    failure = None
    restarts = 0

    def metrics(self) -> EngineMetrics:
        drafter = DrafterMetrics(accepted_by_position=[0])
        return EngineMetrics(drafters={"ngram": drafter})

    def summary(self) -> EngineSummary:
        target = ModelSummary("", 0, 0, "", "", "", None, 0, 0)
        return EngineSummary("", target, {}, (), 0, NO_ADVICE, has_chat_template=True)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def type_of(schema: Schema, definitions: Mapping[str, Schema]) -> str:
    """A JSON schema in a few words; null, which every optional field takes, is left out."""
    if "$ref" in schema:
        return type_of(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    alternatives = schema.get("anyOf") or schema.get("oneOf")
    if alternatives:
        shown = (type_of(s, definitions) for s in alternatives if s.get("type") != "null")
        return " or ".join(dict.fromkeys(shown))
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    kind = str(schema.get("type", "any"))
    if kind == "array":
        return f"list of {type_of(schema.get('items', {}), definitions)}"
    if kind == "object" and "properties" in schema:
        return "object with " + ", ".join(f"`{name}`" for name in schema["properties"])
    return kind + _range(schema)


def _range(schema: Schema) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    if low is not None and high is not None:
        return f", {low:g} to {high:g}" if abs(low) < 2**31 and high < 2**31 - 1 else ""
    bounds = (
        ("at least", low), ("at most", high), ("more than", above), ("less than", below),
    )  # fmt: skip
    return "".join(f", {words} {bound:g}" for words, bound in bounds if bound is not None)


def configuration() -> str:
    """A table of the top-level keys and one for each section."""
    document = Config.model_json_schema()
    definitions = document["$defs"]
    top = []
    sections = []
    for name, schema in document["properties"].items():
        section = schema.get("$ref") or next((s["$ref"] for s in schema.get("allOf", ())), None)
        if section is None:
            top.append(_key(name, schema, definitions))
            continue
        body = definitions[section.rpartition("/")[2]]
        keys = [_key(f"{name}.{k}", s, definitions) for k, s in body["properties"].items()]
        sections.append(f"## {name}\n\n{body['description']}\n\n{table(_KEY_HEADS, keys)}")
    return "\n\n".join([table(_KEY_HEADS, top), *sections])


_KEY_HEADS = ("key", "values", "default", "meaning")


def _key(name: str, schema: Schema, definitions: Mapping[str, Schema]) -> tuple[str, ...]:
    default = schema.get("default")
    shown = (
        ", ".join(map(str, default))
        if isinstance(default, list)
        else str(default).lower()
        if isinstance(default, bool)
        else str(default)
    )
    return (
        f"`{name}`",
        type_of(schema, definitions),
        "" if default is None else f"`{shown}`",
        schema.get("description", ""),
    )


def drafters() -> str:
    """Every drafter."""
    rows = [
        (f"`{name}`", entry.proposes, _needs(entry), entry.good_for)
        for name, entry in DRAFTERS.items()
    ]
    return table(("drafter", "proposes", "needs", "good for"), rows)


def _needs(entry: DrafterEntry) -> str:
    return entry.needs if entry.model_key is None else f"`{entry.model_key}`"


def _openapi() -> dict[str, Any]:
    return create_app(cast("AsyncEngine", IdleEngine()), Config()).openapi()


def endpoints() -> str:
    """Every endpoint."""
    rows = [
        (f"`{method.upper()} {path}`", operation["summary"], operation["tags"][0])
        for path, item in _openapi()["paths"].items()
        for method, operation in item.items()
    ]
    return table(("endpoint", "what it does", "API"), rows)


def fields() -> str:
    """Fields of the generating endpoints: those they share, then each one's own."""
    definitions = _openapi()["components"]["schemas"]
    properties = {name: definitions[name]["properties"] for name in REQUESTS}
    openai = [properties[name] for name in REQUESTS if name != "MessagesRequest"]
    shared = [n for n, s in openai[0].items() if all(p.get(n) == s for p in openai)]
    parts = [
        "### Shared by OpenAI's endpoints\n\n"
        + _field_table({name: openai[0][name] for name in shared}, definitions)
    ]
    for name, path in REQUESTS.items():
        own = {
            field: schema
            for field, schema in properties[name].items()
            if name == "MessagesRequest" or field not in shared
        }
        parts.append(f"### {path}\n\n{_field_table(own, definitions)}")
    return "\n\n".join(parts)


def _field_table(properties: Mapping[str, Schema], definitions: Mapping[str, Schema]) -> str:
    rows = [
        (f"`{name}`", type_of(schema, definitions), schema.get("description", ""))
        for name, schema in properties.items()
    ]
    with_notes = any(note for *_, note in rows)
    heads = ("field", "type", "note")
    return table(heads if with_notes else heads[:2], [r if with_notes else r[:2] for r in rows])


def refused() -> str:
    """Fields that other servers know and this one refuses."""
    rows = [
        (f"`{path}`", ", ".join(f"`{name}`" for name in sorted(names)))
        for path, names in UNSUPPORTED.items()
    ]
    return table(("endpoint", "refused, unless the value asks for nothing"), rows)


def metric_families() -> list[Metric]:
    """Everything that /metrics can show under Slipstream's own names."""
    counts = HttpCounts()
    counts.answered["", "", ""] += 1
    registry = make_registry(cast("AsyncEngine", IdleEngine()), counts, vllm_names=False)
    return [f for f in registry.collect() if f.name.startswith("slipstream_")]


def metrics() -> str:
    """Every metric, with its type and labels."""
    rows = []
    for family in metric_families():
        labels = dict.fromkeys(k for sample in family.samples for k in sample.labels if k != "le")
        name = f"{family.name}_total" if family.type == "counter" else family.name
        shown = ", ".join(f"`{label}`" for label in labels)
        rows.append((f"`{name}`", family.type, shown, family.documentation))
    return table(("metric", "type", "labels", "meaning"), rows)


PARTS: Mapping[str, Callable[[], str]] = {
    part.__name__: part for part in (configuration, drafters, endpoints, fields, refused, metrics)
}


def render(page: str) -> str:
    """A page with its generated parts made anew."""
    return PART.sub(lambda m: f"{m[1]}\n{PARTS[m[2]]()}\n\n{m[3]}", page)


def stale_pages() -> dict[Path, str]:
    """What pages that are out of date should hold."""
    fresh = {path: render(path.read_text("utf-8")) for path in sorted(FOLDER.rglob("*.md"))}
    return {path: text for path, text in fresh.items() if text != path.read_text("utf-8")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    arguments = parser.parse_args()
    stale = stale_pages()
    for path, text in stale.items():
        print(f"{path.name}: {'out of date' if arguments.check else 'written'}")
        if not arguments.check:
            path.write_text(text, encoding="utf-8")
    return 1 if stale and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
