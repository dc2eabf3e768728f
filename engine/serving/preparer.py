"""Preparer: does for a request what takes time in proportion to its size."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from engine.draft.drafter import Drafter
from engine.fault import ANY_FAULT
from engine.preparation import Preparation
from engine.request import GenerationRequest
from engine.sampling.grammar import Grammars
from engine.sampling.grammar_compiler import CompiledGrammar
from engine.scheduling.blocks import extend_block_hashes
from engine.text.tokenizer import TextTokenizer

logger = logging.getLogger(__name__)


class Preparer:
    """Prepares requests for one engine's core; may be called from any thread."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        drafters: Sequence[Drafter],
        grammars: Grammars,
        block_size: int,
    ) -> None:
        """
        Args:
            tokenizer: the target's.
            block_size: tokens of one of the target's KV blocks.
        """
        self._tokenizer = tokenizer
        self._drafters = tuple(drafters)
        self._grammars = grammars
        self._block_size = block_size

    def prepare_all(self, request: GenerationRequest) -> Preparation:
        """Compile the request's grammar too, however long that takes.

        Raises:
            RequestError: the grammar can't be used.
        """
        spec = request.grammar
        return self.prepare(request, None if spec is None else self._grammars.compile(spec))

    def prepare(self, request: GenerationRequest, grammar: CompiledGrammar | None) -> Preparation:
        """
        Args:
            grammar: the request's, if it has one.
        """
        prompt = request.prompt_token_ids
        hashes: list[bytes] = []
        extend_block_hashes(hashes, prompt, self._block_size, len(prompt), request.cache_scope)
        prediction = self._tokenizer.encode_plain(request.prediction) if request.prediction else []
        return Preparation(
            grammar=grammar,
            block_hashes=tuple(hashes),
            num_prediction_tokens=len(prediction),
            drafts=dict(self._preprocess(request, prediction)),
        )

    def _preprocess(
        self, request: GenerationRequest, prediction: Sequence[int]
    ) -> Iterator[tuple[str, Any]]:
        for drafter in self._drafters:
            if request.speculation.mode not in ("auto", drafter.name):
                continue
            try:
                yield drafter.name, drafter.preprocess(request, prediction)
            except ANY_FAULT as error:
                logger.error(
                    "drafter %s can't prepare for a request (%s), which gets none of its drafts",
                    drafter.name, type(error).__name__,
                )  # fmt: skip
