"""Promise 1 on real models: SmolLM2 drafts for Qwen2.5-Coder-0.5B, float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from engine.build import EngineParts, load_parts
from engine.config import Config, SpeculationConfig
from engine.core import EngineCore
from engine.draft.drafter import Drafter
from engine.request import ChatPrompt, GenerationRequest, TextPrompt
from tests.engine.helpers import make_request, run_all, tokens_of
from tests.real.models import QWEN_CODER_05B, SMOLLM2, model_file

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]

SAMPLED = {
    "temperature": 0.8,
    "top_p": 0.9,
    "presence_penalty": 0.2,
    "frequency_penalty": 0.2,
    "repetition_penalty": 1.05,
}
CODE = (
    "def mean(values):\n    total = 0\n    for v in values:\n        total += v\n    return total"
)
PROMPTS: list[tuple[str, dict[str, Any]]] = [
    (f"Rename v to value in this code and return the whole code:\n```python\n{CODE}\n```", {}),
    ("Give me two tips to sleep better.", SAMPLED),
    ("Count from 1 to 12, then in German: eins, zwei, drei.", SAMPLED),
    (f"# The mean of some values, with a docstring\n{CODE}\n\n\ndef median(", {}),
]


@pytest.fixture(scope="module", params=["torch", "native"])
def parts(request: pytest.FixtureRequest) -> EngineParts:
    return load_parts(
        Config(
            model=model_file(QWEN_CODER_05B),
            draft=SMOLLM2,
            runner=request.param,
            device="cpu",
            dtype="float32",
            max_context=1024,
            speculation=SpeculationConfig(drafters=("universal", "ngram"), policy="fixed"),
        )
    )


def requests_for(parts: EngineParts, limit: int = 20) -> list[GenerationRequest]:
    requests = []
    for index, (text, params) in enumerate(PROMPTS):
        source: ChatPrompt | TextPrompt = TextPrompt(text)
        ids = parts.tokenizer.encode(text)
        if not text.startswith("#"):
            source = ChatPrompt(({"role": "user", "content": text},))
            ids = parts.tokenizer.encode_chat(source.messages)
        requests.append(
            make_request(
                ids, f"r{index}", source, max_tokens=limit + 4 * index, seed=index, **params
            )
        )
    return requests


def run(
    parts: EngineParts, drafters: Sequence[Drafter], requests: Sequence[GenerationRequest]
) -> tuple[dict[str, list[int]], EngineCore]:
    core = parts.assemble(drafters)
    return {name: tokens_of(out) for name, out in run_all(core, requests).items()}, core


def test_same_tokens_plain_ngram_universal_alone_and_together(parts: EngineParts) -> None:
    requests = requests_for(parts)
    plain, _ = run(parts, [], requests)
    for request in requests[1:3]:
        alone, _ = run(parts, [], [request])
        assert alone[request.request_id] == plain[request.request_id]
    for drafter in parts.drafters:
        drafted, core = run(parts, [drafter], requests)
        assert drafted == plain, drafter.name
        figures = core.metrics.drafters[drafter.name]
        assert figures.failures == 0
        assert figures.draft_tokens > 0
        assert figures.accepted_tokens > 0 or drafter.name == "ngram"
    both, core = run(parts, parts.drafters, requests)
    assert both == plain
    again = {name: tokens_of(out) for name, out in run_all(core, requests).items()}
    assert core.metrics.prefix_hits > 0
    assert again == plain
