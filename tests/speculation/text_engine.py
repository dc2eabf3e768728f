"""A small engine whose target and drafts speak the same language with different tokenizers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from engine.core import EngineCore
from engine.draft.draft_model import DraftModel
from engine.draft.drafter import Draft, Drafter, DrafterWrapper, DraftRequest
from engine.draft.policy import FixedPolicy, GoodputPolicy, Policy
from engine.draft.table import DRAFTERS, DraftModelKey
from engine.plan import Chunk, StepPlan
from engine.request import ChatPrompt, GenerationRequest, RequestOutput, TextPrompt
from tests.engine.helpers import make_core, make_request, tokens_of
from tests.speculation.fakes import END, FakeTokenizer, TextRunner
from tests.speculation.from_table import make_from_table

LETTERS = "abcdefgh"
ENDING = LETTERS + "!"
"""With this alphabet the model likes to end its answers, else it goes on for ever."""

_SINGLE = [letter.encode() for letter in LETTERS] + [b"="]


def _tokenizer(words: str, template: str) -> FakeTokenizer:
    pieces = [END, *_SINGLE, *(word.encode() for word in words.split())]
    return FakeTokenizer(pieces, special_ids=[0], end_id=0, end_of_turn_id=0, template=template)


TARGET = _tokenizer("ab bc cd de ef fg gh ha ce eg ace gac", "=={content}=")
DRAFT = _tokenizer("ba cb dc abc def ge hg ah ca bcd fgh ec", "{content}=")

NAMES = [name for name in DRAFTERS if name != "grammar"]
"""No request here has a grammar; those that have are in tests/structured."""
DRAFTINGS = [*NAMES, "fixed", "auto"]


class RecordingRunner(TextRunner):
    """Remembers the last slice of each request."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.last_chunks: dict[str, Chunk] = {}

    def execute(self, plan: StepPlan) -> torch.Tensor:
        self.last_chunks.update({chunk.request_id: chunk for chunk in plan.chunks})
        return super().execute(plan)


class FlakyDrafter(DrafterWrapper):
    """Another drafter that raises at some calls, after it has done its work."""

    def __init__(self, inner: Drafter, fails_at: Callable[[int], bool]) -> None:
        super().__init__(inner)
        self._fails_at = fails_at
        self._calls = itertools.count()

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts = super().propose(requests)
        if self._fails_at(next(self._calls)):
            raise RuntimeError("the drafter is out of order")
        return drafts


def draft_model(
    tokenizer: FakeTokenizer,
    alphabet: str,
    *,
    max_context: int = 400,
    runner_class: type[TextRunner] = TextRunner,
    **options: Any,
) -> DraftModel:
    runner = runner_class(tokenizer, alphabet, **({"salt": 7} | options))
    return DraftModel(runner, max_context=max_context, max_step_tokens=24)


def make_drafters(drafting: str, alphabet: str, **options: Any) -> list[Drafter]:
    """One drafter by name, or all of them for "fixed" and "auto"; options go to the models."""
    names = NAMES if drafting in ("fixed", "auto") else [drafting]

    def load(key: DraftModelKey) -> tuple[DraftModel, FakeTokenizer]:
        tokenizer = TARGET if key == "model_draft" else DRAFT
        return draft_model(tokenizer, alphabet, **options), tokenizer

    return make_from_table(names, TARGET, load)


def make_engine(
    drafting: str,
    alphabet: str = LETTERS,
    *,
    num_blocks: int = 512,
    drafters: Sequence[Drafter] | None = None,
    **options: Any,
) -> EngineCore:
    """An engine for "plain", one drafter by name, or all of them, under a policy of that name."""
    if drafters is None:
        drafters = [] if drafting == "plain" else make_drafters(drafting, alphabet, **options)
    policy: Policy = FixedPolicy(5)
    if drafting == "auto":
        policy = GoodputPolicy({d.name: d.cost for d in drafters}, first_length=5)
    return make_core(
        RecordingRunner(TARGET, alphabet, num_blocks=num_blocks),
        drafters=drafters,
        tokenizer=TARGET,
        policy=policy,
    )


def make_requests(
    count: int = 6, *, predictions: Sequence[str] = (), **params: Any
) -> list[GenerationRequest]:
    """Prompts of different lengths, every other one a chat; sampled ones each with a seed."""
    rng = np.random.default_rng(3)
    requests = []
    for index in range(count):
        text = "".join(rng.choice(list(LETTERS), 6 + 7 * index))
        source: ChatPrompt | TextPrompt = TextPrompt(text)
        prompt = TARGET.encode(text)
        if index % 2:
            source = ChatPrompt(({"role": "user", "content": text},))
            prompt = TARGET.encode_chat(source.messages)
        requests.append(
            make_request(
                prompt,
                f"r{index}",
                source,
                **({"max_tokens": 40 + index, "seed": index} | params),
            )
        )
    return requests


def ended_inside_draft(core: EngineCore, outputs: dict[str, list[RequestOutput]]) -> list[str]:
    """Requests whose last token was an accepted draft token, though not by chance the target's."""
    runner = core.target
    assert isinstance(runner, RecordingRunner)
    names = []
    for name, steps in outputs.items():
        chunk, last = runner.last_chunks[name], list(steps[-1].token_ids)
        draft = chunk.token_ids[chunk.num_tokens - chunk.num_draft :].tolist()
        if last and draft[: len(last)] == last:
            names.append(name)
    return names


def answers(outputs: dict[str, list[RequestOutput]]) -> dict[str, Any]:
    """Everything a client sees of each request, however it was cut into steps."""
    return {
        name: (
            tokens_of(steps),
            "".join(step.text for step in steps),
            steps[-1].finish_reason,
            steps[-1].stop_reason,
            steps[-1].usage.completion_tokens,
            [entry for step in steps for entry in step.logprobs],
            steps[0].prompt_logprobs,
        )
        for name, steps in outputs.items()
    }
