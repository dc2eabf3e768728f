"""Structured output of real models: valid, the same under every drafter, and no slower."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import jsonschema
import pytest

from engine.build import EngineParts, load_parts
from engine.config import Config
from engine.core import EngineCore
from engine.draft.drafter import Drafter
from engine.request import ChatPrompt, FinishReason, GenerationRequest, GrammarSpec, RequestOutput
from tests.engine.helpers import make_request, run_all, text_of, tokens_of
from tests.real.models import SMOLLM2
from tests.structured.schemas import SCHEMAS

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def parts() -> EngineParts:
    return load_parts(Config(model=SMOLLM2, device="cpu", max_context=1024))


def request_for(parts: EngineParts, name: str, *, temperature: float) -> GenerationRequest:
    schema = json.dumps(SCHEMAS[name])
    question = f"Answer with one JSON value that satisfies this schema:\n{schema}"
    source = ChatPrompt(({"role": "user", "content": question},))
    request = make_request(
        parts.tokenizer.encode_chat(source.messages),
        f"{name}-{temperature}",
        source,
        max_tokens=200,
        temperature=temperature,
    )
    return replace(request, grammar=GrammarSpec("json_schema", schema))


def run(
    parts: EngineParts, drafters: Sequence[Drafter], requests: Sequence[GenerationRequest]
) -> tuple[dict[str, list[RequestOutput]], EngineCore]:
    core = parts.assemble(drafters)
    return run_all(core, requests), core


def test_outputs_satisfy_their_schemas_under_every_drafter(parts: EngineParts) -> None:
    requests = [request_for(parts, name, temperature=t) for name in SCHEMAS for t in (0.0, 0.8)]
    plain, _ = run(parts, [], requests)
    for request in requests:
        outputs = plain[request.request_id]
        assert outputs[-1].finish_reason is FinishReason.STOP
        schema = SCHEMAS[request.request_id.rpartition("-")[0]]
        jsonschema.Draft202012Validator(schema).validate(json.loads(text_of(outputs)))
    for drafters in ([d] for d in parts.drafters if d.name in ("grammar", "ngram")):
        drafted, core = run(parts, drafters, requests)
        assert {n: tokens_of(o) for n, o in drafted.items()} == {
            n: tokens_of(o) for n, o in plain.items()
        }
        figures = core.metrics.drafters[drafters[0].name]
        assert figures.accepted_tokens > 0
        if drafters[0].name == "grammar":
            assert figures.accepted_tokens == figures.draft_tokens


def test_forced_tokens_halve_the_target_passes_of_an_object_with_long_keys(
    parts: EngineParts,
) -> None:
    request = request_for(parts, "long keys", temperature=0.0)
    drafters = [drafter for drafter in parts.drafters if drafter.name == "grammar"]
    outputs, core = run(parts, drafters, [request])
    assert len(tokens_of(outputs[request.request_id])) > 2 * core.metrics.target_passes
