"""Logits processors: penalties, bias and minimum length, on rows that each have a history."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from engine.request import SamplingParams
from engine.scheduling.sequence import TokenSequence


class TokenHistory:
    """How often each token occurs in one request, kept on the logits' device."""

    def __init__(self, sequence: TokenSequence, vocab_size: int, device: torch.device) -> None:
        prompt = torch.tensor(sequence.token_ids[: sequence.num_prompt], device=device)
        self.in_prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.in_prompt[prompt] = True
        self.output_counts = torch.zeros(vocab_size, dtype=torch.float32, device=device)
        self._num_counted = 0

    def catch_up(self, sequence: TokenSequence) -> None:
        """Count the output tokens committed since the last call."""
        new = sequence.token_ids[sequence.num_prompt + self._num_counted :]
        self._add(new, 1.0)
        self._num_counted += len(new)

    def _add(self, token_ids: Iterable[int], amount: float) -> None:
        ids = torch.tensor(list(token_ids), dtype=torch.int64, device=self.output_counts.device)
        ones = torch.full(ids.shape, amount, device=ids.device)
        self.output_counts.index_add_(0, ids, ones)

    def penalize(self, logits: torch.Tensor, params: SamplingParams, draft: list[int]) -> None:
        """Apply the penalties in place to float32[len(draft) + 1, V]; row j follows draft[:j].

        The repetition penalty counts prompt and output (Keskar et al., arXiv 1909.05858), the
        presence and frequency penalties the output alone, as OpenAI's API does.
        """
        for row, token_id in zip(logits, [*draft, None], strict=True):
            counts = self.output_counts
            if params.repetition_penalty != 1.0:
                seen = self.in_prompt | (counts > 0)
                factor = params.repetition_penalty
                row.copy_(torch.where(seen, torch.where(row > 0, row / factor, row * factor), row))
            row.sub_(counts, alpha=params.frequency_penalty)
            row.sub_((counts > 0).to(row.dtype), alpha=params.presence_penalty)
            if token_id is not None:
                self._add([token_id], 1.0)
        self._add(draft, -1.0)


def has_penalties(params: SamplingParams) -> bool:
    return (
        params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
        or params.repetition_penalty != 1.0
    )


def apply_bias(logits: torch.Tensor, params: SamplingParams) -> None:
    """Add the request's logit_bias in place to float32[N, V]."""
    ids = torch.tensor(list(params.logit_bias), dtype=torch.int64, device=logits.device)
    bias = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=logits.device)
    logits[:, ids] += bias


def forbid_end(logits: torch.Tensor, end_ids: Iterable[int]) -> None:
    """Rule out the tokens that would end the output, in place."""
    ids = torch.tensor(list(end_ids), dtype=torch.int64, device=logits.device)
    logits[:, ids] = -torch.inf
