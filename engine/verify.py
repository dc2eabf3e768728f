"""Verification: logits and drafts in, committed tokens out.

One rule decides: at each position the target samples its own token, after all processors, which
see the history that the draft so far implies; a draft token is accepted when it equals that
sample (`accept_draft`). So every sampling feature works under speculation, and any drafter is
lossless. A request may ask for less (`accept_top_k`): then one of the likeliest tokens is accepted
too, of those that the target could have sampled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from engine.fault import ANY_FAULT
from engine.plan import Chunk, ChunkResult, StepPlan, StepResult
from engine.request import SamplingParams, TokenLogprob
from engine.sampling.grammar import Grammars
from engine.sampling.grammar_mask import (
    MaskBuffer,
    apply_mask,
    forbid_where_possible,
    num_mask_words,
)
from engine.sampling.grammar_matcher import GrammarCheck
from engine.sampling.logprobs import token_logprobs
from engine.sampling.processors import TokenHistory, apply_bias, forbid_end, has_penalties
from engine.sampling.restrict import likeliest
from engine.sampling.sampler import INVALID, sample
from engine.scheduling.sequence import TokenSequence

INVALID_LOGITS = "The model produced invalid logits for this request."


def accept_draft(
    draft: Sequence[int], own: Sequence[int], likely: Sequence[Collection[int]]
) -> list[int]:
    """The accept rule: a draft's leading tokens, up to the first that the target does not agree to.

    The target agrees to a token that equals its own sample in that place. Under lossy acceptance,
    which a request has to ask for, it agrees to its likeliest tokens too.

    Args:
        draft: draft tokens.
        own: the target's own samples, one in the place of each draft token at least.
        likely: tokens that do as well, one collection for each draft token, empty unless lossy.
    """
    for index, (drafted, sampled) in enumerate(zip(draft, own, strict=False)):
        if drafted != sampled and drafted not in likely[index]:
            return list(draft[:index])
    return list(draft)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Where one chunk's logits lie and what they are for."""

    chunk: Chunk
    sequence: TokenSequence
    first: int
    num_scored: int
    """Leading rows that only score prompt tokens."""
    num_sampled: int
    """Rows that decide an output token: one behind each draft token and one before them all."""

    @property
    def sampled(self) -> slice:
        return slice(self.first + self.num_scored, self.first + self.num_scored + self.num_sampled)

    @property
    def draft(self) -> list[int]:
        chunk = self.chunk
        return [int(i) for i in chunk.token_ids[chunk.num_tokens - chunk.num_draft :]]


class Verifier:
    """Samples the target's tokens and accepts drafts. Keeps token histories for penalties."""

    def __init__(
        self, token_bytes: Sequence[bytes], eos_ids: Iterable[int], grammars: Grammars
    ) -> None:
        self._token_bytes = token_bytes
        self._eos_ids = frozenset(eos_ids)
        self._grammars = grammars
        self._mask_buffer = MaskBuffer()
        self._histories: dict[str, TokenHistory] = {}

    def forget(self, request_id: str) -> None:
        """Drop what is kept about a request that has ended."""
        self._histories.pop(request_id, None)

    def verify(
        self,
        plan: StepPlan,
        sequence_of: Callable[[str], TokenSequence],
        logits: torch.Tensor,
    ) -> StepResult:
        """Decide every chunk. When this raises, it can be called again.

        Args:
            plan: the executed plan; its sequences have not been advanced yet.
            sequence_of: finds a chunk's sequence by request id.
            logits: float32[L, V] in plan order; left unchanged.
        """
        try:
            return self._verify(plan, sequence_of, logits)
        except ANY_FAULT:
            for chunk in plan.chunks:
                self._invalidate(chunk.request_id)
            raise

    def _invalidate(self, request_id: str) -> None:
        """Make anew what is kept about a request: `_verify` raised, perhaps in the middle of it."""
        self._histories.pop(request_id, None)
        matcher = self._grammars.of(request_id)
        if matcher is not None:
            matcher.invalidate()

    def _verify(
        self,
        plan: StepPlan,
        sequence_of: Callable[[str], TokenSequence],
        logits: torch.Tensor,
    ) -> StepResult:
        layout = _layout(plan, sequence_of)
        checks = self._check_grammars(layout)
        chosen, processed = self._sample(layout, logits, checks)
        results, offset = [], 0
        for rows in layout:
            check = checks.get(rows.sequence.request_id)
            num_decided = rows.num_sampled if check is None else check.num_rows
            tokens = chosen[offset : offset + num_decided]
            sampled_from = processed[offset : offset + num_decided]
            offset += rows.num_sampled
            error = None if check is None else check.error
            if INVALID in tokens:
                # What a draft ran into is of no account as long as something comes before it.
                tokens = tokens[: tokens.index(INVALID)]
                error = None if tokens else INVALID_LOGITS
            accepted = _accepted(rows, tokens, sampled_from)
            results.append(self._result(rows, logits, tokens, accepted, error))
        return StepResult(results)

    def _result(
        self,
        rows: _Rows,
        logits: torch.Tensor,
        tokens: list[int],
        accepted: list[int],
        error: str | None,
    ) -> ChunkResult:
        """
        Args:
            tokens: the target's own, at the leading rows that count.
            accepted: leading draft tokens.
        """
        committed = (*accepted, *tokens[len(accepted) : len(accepted) + 1])
        logprobs = self._output_logprobs(rows, logits, committed)
        prompt_logprobs = self._prompt_logprobs(rows, logits)
        if any(math.isnan(entry.logprob) for entry in (*logprobs, *prompt_logprobs)):
            return ChunkResult((), error=INVALID_LOGITS)
        return ChunkResult(
            token_ids=committed,
            num_accepted=len(accepted),
            num_lossy=sum(a != b for a, b in zip(accepted, tokens, strict=False)),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            error=error,
        )

    def _check_grammars(self, layout: Sequence[_Rows]) -> dict[str, GrammarCheck]:
        """By request id, what the grammars allow at every sampled row."""
        self._mask_buffer.clear()
        checks = {}
        for rows in layout:
            sequence = rows.sequence
            matcher = self._grammars.of(sequence.request_id) if rows.num_sampled else None
            if matcher is not None:
                matcher.catch_up(sequence)
                num_words = num_mask_words(self._grammars.vocab_size)
                masks = self._mask_buffer.take(rows.num_sampled, num_words)
                checks[sequence.request_id] = matcher.check(sequence, rows.draft, masks)
        return checks

    def _sample(
        self,
        layout: Sequence[_Rows],
        logits: torch.Tensor,
        checks: Mapping[str, GrammarCheck],
    ) -> tuple[list[int], torch.Tensor]:
        """The target's tokens at all sampled rows, and the logits that each was sampled from."""
        sampling = [rows for rows in layout if rows.num_sampled]
        if not sampling:
            return [], logits[:0]
        index = [row for rows in sampling for row in range(len(logits))[rows.sampled]]
        params = [rows.sequence.params for rows in sampling for _ in range(rows.num_sampled)]
        positions = [
            rows.sequence.num_output + row for rows in sampling for row in range(rows.num_sampled)
        ]
        untouched = not checks and not any(map(self._needs_processing, sampling))
        if untouched and len(index) == len(logits):
            return sample(logits, params, positions), logits
        selected = logits[torch.tensor(index, device=logits.device)]
        first = 0
        for rows in sampling:
            check = checks.get(rows.sequence.request_id)
            self._process(rows, selected[first : first + rows.num_sampled], check)
            first += rows.num_sampled
        return sample(selected, params, positions), selected

    @staticmethod
    def _needs_processing(rows: _Rows) -> bool:
        params = rows.sequence.params
        below_minimum = rows.sequence.num_output < params.min_tokens
        return has_penalties(params) or bool(params.logit_bias) or below_minimum

    def _process(self, rows: _Rows, logits: torch.Tensor, check: GrammarCheck | None) -> None:
        """Apply the request's processors in place to float32[num_sampled, V]."""
        params, sequence = rows.sequence.params, rows.sequence
        if has_penalties(params):
            history = self._histories.get(sequence.request_id)
            if history is None:
                history = TokenHistory(sequence, logits.shape[1], logits.device)
                self._histories[sequence.request_id] = history
            history.catch_up(sequence)
            history.penalize(logits, params, rows.draft)
        if params.logit_bias:
            apply_bias(logits, params)
        num_below_minimum = max(0, params.min_tokens - sequence.num_output)
        if check is not None:
            forbid_where_possible(check.masks[:num_below_minimum], self._end_ids(params))
            apply_mask(logits, check.masks)
        elif num_below_minimum:
            forbid_end(logits[:num_below_minimum], self._end_ids(params))

    def _end_ids(self, params: SamplingParams) -> frozenset[int]:
        return params.stop_token_ids if params.ignore_eos else params.stop_token_ids | self._eos_ids

    def _output_logprobs(
        self, rows: _Rows, logits: torch.Tensor, committed: tuple[int, ...]
    ) -> tuple[TokenLogprob, ...]:
        num_top = rows.sequence.params.logprobs
        if num_top is None or not committed:
            return ()
        scored = logits[rows.sampled][: len(committed)]
        return tuple(
            token_logprobs(scored, committed, [num_top] * len(committed), self._token_bytes)
        )

    def _prompt_logprobs(self, rows: _Rows, logits: torch.Tensor) -> tuple[TokenLogprob, ...]:
        num_top = rows.sequence.params.prompt_logprobs
        if num_top is None or not rows.num_scored:
            return ()
        start = rows.chunk.start + rows.chunk.first_logit + 1
        targets = rows.sequence.token_ids[start : start + rows.num_scored]
        scored = logits[rows.first : rows.first + rows.num_scored]
        return tuple(token_logprobs(scored, targets, [num_top] * len(targets), self._token_bytes))


def _layout(plan: StepPlan, sequence_of: Callable[[str], TokenSequence]) -> list[_Rows]:
    layout, first = [], 0
    for chunk in plan.chunks:
        sequence = sequence_of(chunk.request_id)
        samples = chunk.end - chunk.num_draft == sequence.num_tokens
        num_sampled = chunk.num_draft + 1 if samples else 0
        num_scored = chunk.num_logits - num_sampled
        layout.append(_Rows(chunk, sequence, first, num_scored, num_sampled))
        first += chunk.num_logits
    return layout


def _accepted(rows: _Rows, tokens: Sequence[int], sampled_from: torch.Tensor) -> list[int]:
    """The leading tokens of a request's draft that are accepted.

    Args:
        tokens: the target's own.
        sampled_from: float32[at least len(tokens), V], processed logits.
    """
    draft = rows.draft[: max(0, len(tokens) - 1)]
    top_k = rows.sequence.request.speculation.accept_top_k
    likely: list[list[int]] = [[]] * len(draft)
    if top_k is not None and draft:
        likely = likeliest(sampled_from[: len(draft)], rows.sequence.params, top_k)
    return accept_draft(draft, tokens, likely)
