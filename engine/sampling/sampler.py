"""Draws one token a row, by the Gumbel-max rule with keyed noise."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.request import SamplingParams
from engine.sampling.candidates import likely_winners
from engine.sampling.noise import gumbel_noise, row_keys
from engine.sampling.reductions import argmax
from engine.sampling.restrict import smallest_kept

INVALID = -1
"""In place of a token, where the logits are no numbers."""


def sample(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    noise_ids: torch.Tensor | None = None,
) -> list[int]:
    """Choose a token for every row.

    Args:
        logits: float32[N, V], after the processors.
        params: the request's parameters, one entry a row.
        positions: output position of the token each row decides.
        noise_ids: int64[V], under which id each column draws its noise; default: its own. A draft
            that uses the target's ids draws what the target draws (coupling).

    Returns:
        N token ids: the likeliest at temperature 0, else a sample that depends only on the row's
        logits, the request's seed and the position. `INVALID` where the logits hold a NaN or
        infinity, or allow no token.
    """
    tokens = argmax(logits)
    # A NaN or infinity counts as the largest, so the largest tells of any in its row.
    is_valid = logits.gather(1, tokens[:, None])[:, 0].isfinite()
    drawn = [i for i, p in enumerate(params) if not p.greedy]
    if drawn:
        index = torch.tensor(drawn, device=logits.device)
        rows = logits if len(drawn) == len(params) else logits[index]
        tokens[index] = _draw(
            rows, [params[i] for i in drawn], [positions[i] for i in drawn], noise_ids
        )
    ids: list[int] = tokens.where(is_valid, INVALID).tolist()
    return ids


def _draw(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    noise_ids: torch.Tensor | None,
) -> torch.Tensor:
    device = logits.device
    if noise_ids is None:
        noise_ids = torch.arange(logits.shape[1], device=device)
    if any(p.temperature != 1.0 for p in params):
        temperatures = torch.tensor([p.temperature for p in params], device=device)
        logits = logits / temperatures[:, None]
    floors = smallest_kept(logits, params)
    keys = row_keys(
        torch.tensor([p.seed for p in params], device=device),
        torch.tensor(positions, device=device),
    )
    likeliest = argmax(logits)
    best_score = logits.gather(1, likeliest[:, None])[:, 0].to(torch.float64)
    best_score += gumbel_noise(keys, noise_ids[likeliest])
    rows, tokens = likely_winners(logits, floors, best_score, keys, noise_ids)
    scores = logits[rows, tokens].to(torch.float64) + gumbel_noise(keys[rows], noise_ids[tokens])
    best_score.scatter_reduce_(0, rows, scores, "amax")
    winners = scores == best_score[rows]
    winner = likeliest.clone()
    # Of equal scores the smallest id wins.
    return winner.scatter_reduce_(0, rows[winners], tokens[winners], "amin", include_self=False)
