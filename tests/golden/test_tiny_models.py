"""Promise 1 on trained tiny models: the same tokens, whatever speculates and whoever shares."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.core import EngineCore
from engine.draft.draft_model import DraftModel
from engine.draft.drafter import Drafter
from engine.draft.policy import FixedPolicy, GoodputPolicy, Policy
from engine.draft.speculator import Speculator
from engine.draft.table import DRAFTERS, DraftModelKey
from engine.draft.universal import UniversalDrafter
from engine.models.runner import KvBudget
from engine.models.torch_runner import TorchRunner
from engine.request import ChatPrompt, GenerationRequest, TextPrompt
from engine.scheduling.blocks import BlockPool
from engine.scheduling.scheduler import Scheduler
from engine.serving.admission import ModelLimits
from engine.text.tokenizer import TextTokenizer
from tests.engine.helpers import make_request, run_all, tokens_of
from tests.speculation.from_table import make_from_table
from tests.tiers import slow_unless_auto
from tests.tiny_models import sentences

SAMPLED = {
    "temperature": 0.8,
    "top_p": 0.9,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.1,
    "repetition_penalty": 1.05,
}
NAMES = [name for name in DRAFTERS if name not in ("grammar", "predicted")]
"""Requests that have a grammar or a prediction are in tests/structured and tests/speculation."""
DRAFTINGS = ["plain", *NAMES, "universal+ngram", "auto"]


@functools.cache
def runner(folder: Path, num_blocks: int) -> TorchRunner:
    made = TorchRunner.load(
        folder,
        device=torch.device("cpu"),
        dtype=torch.float32,
        budget=KvBudget(16, memory_bytes=1 << 30, max_requests=num_blocks * 16 // 512),
    )
    assert made.num_blocks == num_blocks
    return made


@functools.cache
def tokenizer(folder: Path) -> TextTokenizer:
    return TextTokenizer.load(folder)


def universal(target: Path, draft: Path, draft_runner: TorchRunner) -> UniversalDrafter:
    model = DraftModel(draft_runner, max_context=512, max_step_tokens=64)
    return UniversalDrafter(model, tokenizer(draft), tokenizer(target))


@dataclass(frozen=True, slots=True)
class Folders:
    target: Path
    universal: Path
    model: Path


@pytest.fixture(scope="module")
def folders(tiny_model_dir: Path, tiny_draft_dir: Path, tiny_sibling_dir: Path) -> Folders:
    return Folders(tiny_model_dir, tiny_draft_dir, tiny_sibling_dir)


def make_drafters(folders: Folders, drafting: str) -> list[Drafter]:
    names = NAMES if drafting == "auto" else drafting.split("+")

    def load(key: DraftModelKey) -> tuple[DraftModel, TextTokenizer]:
        folder = folders.model if key == "model_draft" else folders.universal
        model = DraftModel(runner(folder, 128), max_context=512, max_step_tokens=64)
        return model, tokenizer(folder)

    drafters = [name for name in names if name != "plain"]
    return make_from_table(drafters, tokenizer(folders.target), load)


def make_engine(
    target: Path, drafters: Sequence[Drafter], *, auto: bool = False, num_blocks: int = 256
) -> EngineCore:
    ticks = itertools.count()
    policy: Policy = FixedPolicy(5)
    if auto:
        policy = GoodputPolicy({d.name: d.cost for d in drafters}, first_length=5)
    model = runner(target, num_blocks)
    return EngineCore(
        model_name="tiny",
        target=model,
        tokenizer=tokenizer(target),
        scheduler=Scheduler(
            BlockPool(num_blocks, 16),
            max_running=8,
            max_step_tokens=128,
            prefill_chunk=48,
            clock=lambda: float(next(ticks)),
        ),
        speculator=Speculator(drafters, policy),
        limits=ModelLimits(512, model.info.vocab_size),
        clock=lambda: float(next(ticks)),
    )


def requests_for(target: Path, params: dict[str, Any], count: int) -> list[GenerationRequest]:
    tokens = tokenizer(target)
    requests = []
    for index in range(count):
        text = sentences(1 + 3 * index, seed=index)[: -3 - index]
        source: ChatPrompt | TextPrompt = TextPrompt(text)
        prompt = tokens.encode(text)
        if index % 2:
            source = ChatPrompt(({"role": "user", "content": text},))
            prompt = tokens.encode_chat(source.messages)
        requests.append(
            make_request(prompt, f"r{index}", source, max_tokens=40 + index, seed=index, **params)
        )
    return requests


@functools.cache
def plain_alone(target: Path, sampled: bool, count: int = 8) -> dict[str, list[int]]:
    answers = {}
    for request in requests_for(target, SAMPLED if sampled else {}, count):
        core = make_engine(target, [])
        answers[request.request_id] = tokens_of(run_all(core, [request])[request.request_id])
    return answers


def answers_of(core: EngineCore, requests: Sequence[GenerationRequest]) -> dict[str, list[int]]:
    return {name: tokens_of(out) for name, out in run_all(core, requests).items()}


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafting", slow_unless_auto(DRAFTINGS))
def test_alone_and_in_a_mixed_batch(drafting: str, sampled: bool, folders: Folders) -> None:
    expected = plain_alone(folders.target, sampled)
    requests = requests_for(folders.target, SAMPLED if sampled else {}, 8)
    drafters = functools.partial(make_drafters, folders, drafting)
    together = make_engine(folders.target, drafters(), auto=drafting == "auto")
    assert answers_of(together, requests) == expected
    alone = make_engine(folders.target, drafters(), auto=drafting == "auto")
    assert answers_of(alone, requests[5:6]) == {"r5": expected["r5"]}
    figures = together.metrics.drafters.values()
    assert not any(f.failures for f in figures)
    if drafting != "plain" and not (sampled and drafting == "ngram"):
        assert sum(f.accepted_tokens for f in figures) > 0


@pytest.mark.slow
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafting", DRAFTINGS)
def test_with_preemption_and_prefix_cache_hits(
    drafting: str, sampled: bool, folders: Folders
) -> None:
    expected = plain_alone(folders.target, sampled)
    requests = requests_for(folders.target, SAMPLED if sampled else {}, 8)
    drafters = functools.partial(make_drafters, folders, drafting)
    starved = make_engine(folders.target, drafters(), auto=drafting == "auto", num_blocks=32)
    assert answers_of(starved, requests) == expected
    assert starved.metrics.preemptions > 0
    core = make_engine(folders.target, drafters(), auto=drafting == "auto")
    assert answers_of(core, requests) == expected
    hits = core.metrics.prefix_hits
    assert answers_of(core, requests) == expected
    assert core.metrics.prefix_hits - hits > 200


@pytest.mark.slow
def test_universal_drafts_many_tokens_a_pass(folders: Folders) -> None:
    """Text crosses tokenizers with emoji and accents in it, or drafts would rarely be accepted."""
    drafters = make_drafters(folders, "universal")
    core = make_engine(folders.target, drafters)
    run_all(core, requests_for(folders.target, {}, 8))
    assert core.metrics.generated_tokens / core.metrics.target_passes > 1.7


@pytest.mark.slow
def test_same_model_as_its_own_draft_is_almost_always_right(folders: Folders) -> None:
    core = make_engine(
        folders.target, [universal(folders.target, folders.target, runner(folders.target, 128))]
    )
    run_all(core, requests_for(folders.target, {}, 8))
    figures = core.metrics.drafters["universal"]
    assert figures.accepted_tokens / figures.draft_tokens > 0.9


@pytest.mark.slow
def test_drafts_survive_a_draft_cache_that_is_too_small(folders: Folders) -> None:
    small = TorchRunner.load(
        folders.universal,
        device=torch.device("cpu"),
        dtype=torch.float32,
        budget=KvBudget(16, memory_bytes=20 * 16 * 384, max_requests=8),
    )
    assert small.num_blocks == 20
    drafter = universal(folders.target, folders.universal, small)
    core = make_engine(folders.target, [drafter])
    requests = requests_for(folders.target, {}, 8)
    assert answers_of(core, requests) == plain_alone(folders.target, False)
    assert core.metrics.drafters["universal"].accepted_tokens > 0
    assert core.metrics.drafters["universal"].failures == 0
