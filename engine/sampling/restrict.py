"""Truncation of the distribution: top-k, then top-p, then min-p, on scaled logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.request import SamplingParams
from engine.sampling.reductions import ascending, double_sum

_USUAL_NUCLEUS = 2048
"""Tokens among which a nucleus is looked for first."""


def smallest_kept(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """float32[N]: the smallest logit that each row's top_k, top_p and min_p leave in.

    Args:
        logits: float32[N, V], already divided by the temperature.
        params: one entry a row. Tokens tied with the last one kept are kept too.
    """
    vocab_size = logits.shape[1]
    floors = torch.full((len(params),), -torch.inf, device=logits.device)
    cut = [i for i, p in enumerate(params) if 0 < p.top_k < vocab_size or p.top_p < 1.0]
    if cut:
        index = torch.tensor(cut, device=logits.device)
        floors[index] = _floors(ascending(logits[index]), [params[i] for i in cut])
    by_min = [i for i, p in enumerate(params) if p.min_p > 0.0]
    if by_min:
        index = torch.tensor(by_min, device=logits.device)
        ratio = torch.tensor([params[i].min_p for i in by_min], device=logits.device)
        least = logits[index].amax(dim=1) + ratio.log()
        floors[index] = torch.maximum(floors[index], least)
    return floors


def likeliest(logits: torch.Tensor, params: SamplingParams, count: int) -> list[list[int]]:
    """Each row's likeliest tokens, at most `count`, of those that a request may be given.

    Args:
        logits: float32[N, V], after the processors.
        params: the request's; its truncation holds at temperature 0 too, as at 1.
    """
    scaled = logits if params.greedy else logits / params.temperature
    values, ids = scaled.topk(min(count, logits.shape[1]), dim=1)
    floors = smallest_kept(scaled, [params] * len(scaled))
    kept = (values >= floors[:, None]) & values.isfinite()
    return [row[is_kept].tolist() for row, is_kept in zip(ids, kept, strict=True)]


def _floors(ordered: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Smallest logit that top_k and top_p keep in each row of logits sorted upwards.

    Top-p keeps the smallest set of likeliest tokens whose mass, of all that top-k keeps, reaches
    top_p.
    """
    device, vocab_size = ordered.device, ordered.shape[1]
    ks = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
    floors = ordered.gather(1, vocab_size - torch.tensor(ks, device=device)[:, None])
    if all(p.top_p >= 1.0 for p in params):
        return floors[:, 0]
    first_kept = torch.searchsorted(ordered, floors)[:, 0].clamp(max=vocab_size - 1)
    kept = ordered[:, int(first_kept.min()) :]
    weights = (kept - kept[:, -1:]).exp_()
    if any(k < vocab_size for k in ks):
        weights.masked_fill_(kept < floors, 0.0)
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device)
    first_of_nucleus = vocab_size - _nucleus_size(weights, top_p)
    first = torch.where(top_p < 1.0, torch.maximum(first_of_nucleus, first_kept), first_kept)
    return ordered.gather(1, first[:, None])[:, 0]


def _nucleus_size(weights: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """How many of each row's rising weights [N, V], from the last, reach top_p of their sum."""
    wanted = top_p[:, None] * double_sum(weights)[:, None]
    mass = weights[:, -_USUAL_NUCLEUS:].flip(1).cumsum(dim=1, dtype=torch.float64)
    if bool((mass[:, -1:] < wanted).any()):
        mass = weights.flip(1).cumsum(dim=1, dtype=torch.float64)
    return (torch.searchsorted(mass, wanted)[:, 0] + 1).clamp(max=weights.shape[1])
