"""Engines for structured output: a real tokenizer, and a mock model that has no sense of JSON."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from engine.core import EngineCore
from engine.draft.draft_model import DraftModel
from engine.draft.drafter import Drafter
from engine.draft.policy import FixedPolicy, GoodputPolicy, Policy
from engine.draft.table import DRAFTERS, DraftModelKey
from engine.request import GenerationRequest, GrammarSpec, RequestOutput, TextPrompt
from engine.sampling.grammar import Grammars
from engine.sampling.grammar_mask import BitMask, num_mask_words
from engine.sampling.grammar_matcher import GrammarCheck
from engine.scheduling.sequence import TokenSequence
from engine.text.tokenizer import TextTokenizer
from tests.engine.helpers import make_core, make_request, run_all
from tests.engine.mock_model import MockRunner
from tests.speculation.from_table import make_from_table
from tests.tiny_models import TokenizerStyle, make_tokenizer

NUM_PADDING = 21
"""Columns of the logits beyond the tokenizer's vocabulary."""
DRAFTINGS = [*DRAFTERS, "fixed", "auto"]


@functools.cache
def tokenizer(style: TokenizerStyle = "byte_level") -> TextTokenizer:
    return TextTokenizer(make_tokenizer(style, 400 if style == "byte_level" else 500))


@functools.cache
def grammars(style: TokenizerStyle = "byte_level") -> Grammars:
    text = tokenizer(style)
    return Grammars(text, len(text.token_bytes) + NUM_PADDING)


class BabblingRunner(MockRunner):
    """Likes what followed the last tokens before; likes the padding columns best of all."""

    def __init__(self, style: TokenizerStyle = "byte_level", **options: Any) -> None:
        num_tokens = len(tokenizer(style).token_bytes)
        super().__init__(vocab_size=num_tokens + NUM_PADDING, **options)
        self._num_tokens = num_tokens

    def _logits(self, context: np.ndarray) -> np.ndarray:
        # Short memory, so that phrases come again and drafts are often right.
        logits = super()._logits(context[-2:])
        logits[self._num_tokens :] += 50.0
        return logits


class SpeakingRunner(BabblingRunner):
    """The same without the weakness for padding, for requests that no grammar restrains."""

    def _logits(self, context: np.ndarray) -> np.ndarray:
        logits = super()._logits(context)
        logits[self._num_tokens :] = -50.0
        return logits


def make_drafters(style: TokenizerStyle, drafting: str) -> list[Drafter]:
    other: TokenizerStyle = "sentencepiece" if style == "byte_level" else "byte_level"

    def load(key: DraftModelKey) -> tuple[DraftModel, TextTokenizer]:
        of = style if key == "model_draft" else other
        runner = SpeakingRunner(of, num_blocks=512)
        return DraftModel(runner, max_context=1024, max_step_tokens=64), tokenizer(of)

    every = list(DRAFTERS)
    names = {"plain": [], "fixed": every, "auto": every}.get(drafting, [drafting])
    return make_from_table(
        names, tokenizer(style), load, grammars=grammars(style), ngram_min=1, ngram_max=3
    )


def make_engine(
    drafting: str = "plain",
    *,
    style: TokenizerStyle = "byte_level",
    runner: MockRunner | None = None,
    num_blocks: int = 512,
    **options: Any,
) -> EngineCore:
    drafters = make_drafters(style, drafting)
    policy: Policy = FixedPolicy(4)
    if drafting == "auto":
        policy = GoodputPolicy({d.name: d.cost for d in drafters}, first_length=4)
    return make_core(
        runner or SpeakingRunner(style, num_blocks=num_blocks),
        drafters=drafters,
        tokenizer=tokenizer(style),
        policy=policy,
        grammars=grammars(style),
        **options,
    )


def json_schema(schema: Any) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(schema))


def structured(
    grammar: GrammarSpec | None,
    request_id: str | None = None,
    *,
    prompt: str = "the old man sells 12 boxes. the cat eats",
    style: TokenizerStyle = "byte_level",
    prediction: str | None = None,
    **params: Any,
) -> GenerationRequest:
    defaults: dict[str, Any] = {"max_tokens": 150}
    request = make_request(
        tokenizer(style).encode(prompt), request_id, TextPrompt(prompt), **(defaults | params)
    )
    return replace(request, grammar=grammar, prediction=prediction)


def alone(request: GenerationRequest, **options: Any) -> list[RequestOutput]:
    """Outputs of a request that has an engine to itself."""
    return run_all(make_engine(**options), [request])[request.request_id]


class Walk:
    """A way through a grammar, token by token."""

    def __init__(self, spec: GrammarSpec, style: TokenizerStyle = "byte_level") -> None:
        self._num_words = num_mask_words(grammars(style).vocab_size)
        known = grammars(style)
        self.matcher = known.matcher(known.compile(spec))
        self.sequence = TokenSequence(make_request([0]), 0.0)

    def commit(self, token_id: int) -> None:
        self.sequence.token_ids.append(token_id)
        self.matcher.catch_up(self.sequence)

    def check(self, draft: Sequence[int]) -> GrammarCheck:
        masks = np.empty((len(draft) + 1, self._num_words), np.int32)
        return self.matcher.check(self.sequence, list(draft), masks)

    def num_allowed(self, draft: Sequence[int]) -> int:
        """Leading tokens of a draft that the grammar allows."""
        return self.check(draft).num_rows - 1

    def allowed(self) -> list[int]:
        """Tokens that may come next; none where the way ends."""
        check = self.check([])
        return allowed_in(check.masks[0]) if check.num_rows else []


def allowed_in(row: BitMask) -> list[int]:
    ids: list[int] = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
    return ids
