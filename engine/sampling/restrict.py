"""Truncation of the distribution: top-k, then top-p, then min-p, on scaled logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.request import SamplingParams

_NUCLEUS_GUESS = 1024
"""Tokens sorted at first to find a nucleus; sorting the whole vocabulary is rarely needed."""


def restrict(logits: torch.Tensor, params: Sequence[SamplingParams]) -> None:
    """Set what each row's top_k, top_p and min_p rule out to -inf, in place.

    Args:
        logits: float32[N, V], already divided by the temperature.
        params: one entry a row. Tokens tied with the last one kept are kept too.
    """
    vocab_size = logits.shape[1]
    by_k = [i for i, p in enumerate(params) if 0 < p.top_k < vocab_size]
    if by_k:
        _keep_at_least(logits, by_k, _kth_largest(logits[by_k], [params[i].top_k for i in by_k]))
    by_p = [i for i, p in enumerate(params) if p.top_p < 1.0]
    if by_p:
        _keep_at_least(logits, by_p, _nucleus_floor(logits[by_p], [params[i].top_p for i in by_p]))
    by_min = [i for i, p in enumerate(params) if p.min_p > 0.0]
    if by_min:
        ratio = torch.tensor([params[i].min_p for i in by_min], device=logits.device)
        _keep_at_least(logits, by_min, logits[by_min].amax(dim=1) + ratio.log())


def _keep_at_least(logits: torch.Tensor, rows: list[int], floors: torch.Tensor) -> None:
    index = torch.tensor(rows, device=logits.device)
    logits[index] = logits[index].masked_fill(logits[index] < floors[:, None], -torch.inf)


def _kth_largest(logits: torch.Tensor, ks: list[int]) -> torch.Tensor:
    largest = logits.topk(max(ks), dim=1).values
    return largest.gather(1, torch.tensor(ks, device=logits.device)[:, None] - 1)[:, 0]


def _nucleus_floor(logits: torch.Tensor, top_ps: list[float]) -> torch.Tensor:
    """Smallest logit of the smallest set of likeliest tokens whose mass reaches top_p."""
    wanted = torch.tensor(top_ps, device=logits.device)[:, None]
    log_total = logits.logsumexp(dim=1, keepdim=True)
    count = min(_NUCLEUS_GUESS, logits.shape[1])
    while True:
        largest = logits.topk(count, dim=1).values
        mass = (largest - log_total).exp().cumsum(dim=1)
        if count == logits.shape[1] or bool((mass[:, -1:] >= wanted).all()):
            break
        count = logits.shape[1]
    # A token is in the nucleus when the mass before it has not reached top_p yet.
    kept = (mass[:, :-1] < wanted).sum(dim=1, keepdim=True)
    return largest.gather(1, kept)[:, 0]
