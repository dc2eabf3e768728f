"""Draws one token a row, by the Gumbel-max rule with keyed noise."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.request import SamplingParams
from engine.sampling.noise import MAX_NOISE, gumbel_noise, row_keys
from engine.sampling.restrict import restrict

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
    tokens = logits.argmax(dim=1)
    # A NaN or infinity counts as the largest, so the largest tells of any in its row.
    is_valid = logits.gather(1, tokens[:, None])[:, 0].isfinite()
    drawn = [i for i, p in enumerate(params) if not p.greedy]
    if drawn:
        index = torch.tensor(drawn, device=logits.device)
        tokens[index] = _draw(
            logits[index], [params[i] for i in drawn], [positions[i] for i in drawn], noise_ids
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

    def noise(row_keys: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        return gumbel_noise(row_keys, columns if noise_ids is None else noise_ids[columns])

    temperatures = torch.tensor([p.temperature for p in params], device=device)
    logits = logits / temperatures[:, None]
    restrict(logits, params)
    keys = row_keys(
        torch.tensor([p.seed for p in params], device=device),
        torch.tensor(positions, device=device),
    )
    best_logit, best_token = logits.max(dim=1)
    score_of_best = best_logit.to(torch.float64) + noise(keys, best_token)
    # Noise is bounded, so a token this far below can't win: no noise is drawn for it.
    can_win = logits > (score_of_best - MAX_NOISE)[:, None]
    can_win[torch.arange(len(params), device=device), best_token] = True
    rows, tokens = can_win.nonzero(as_tuple=True)
    scores = logits[rows, tokens].to(torch.float64) + noise(keys[rows], tokens)
    best_score = torch.full_like(score_of_best, -torch.inf)
    best_score.scatter_reduce_(0, rows, scores, "amax")
    winners = scores == best_score[rows]
    chosen = torch.full_like(best_token, logits.shape[1])
    return chosen.scatter_reduce_(0, rows[winners], tokens[winners], "amin")
