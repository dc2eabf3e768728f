"""Draws one token a row, by the Gumbel-max rule with keyed noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.request import SamplingParams
from engine.sampling.candidates import likely_winners
from engine.sampling.noise import gumbel_noise, row_keys
from engine.sampling.reductions import argmax
from engine.sampling.restrict import smallest_kept

INVALID = -1
"""In place of a token, where the logits are no numbers."""
_RIVALS_WITHIN = 4.0
"""Scores further below the best hardly count as rivals."""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One token a row, and the confidence of each: in 0 to 1, where it was asked for."""

    token_ids: list[int]
    confidences: list[float]
    """At temperature 0 the token's probability. Of a drawn token, whose rivals are those with
    nearly its score, the same over scores: logits with the noise that the target adds too."""


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
    return _chosen(logits, params, positions, noise_ids, rivals_within=None).token_ids


def sample_with_confidence(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    noise_ids: torch.Tensor | None = None,
) -> SampledTokens:
    """Like `sample`, for a draft model: also how sure each token is to be the target's."""
    return _chosen(logits, params, positions, noise_ids, rivals_within=_RIVALS_WITHIN)


def _chosen(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    noise_ids: torch.Tensor | None,
    *,
    rivals_within: float | None,
) -> SampledTokens:
    tokens = argmax(logits)
    # A NaN or infinity counts as the largest, so the largest tells of any in its row.
    largest = logits.gather(1, tokens[:, None])[:, 0]
    is_valid = largest.isfinite()
    drawn = [i for i, p in enumerate(params) if not p.greedy]
    confidence = None
    if rivals_within is not None:
        confidence = (largest - logits.logsumexp(dim=1)).exp().double()
    if drawn:
        index = torch.tensor(drawn, device=logits.device)
        rows = logits if len(drawn) == len(params) else logits[index]
        tokens[index], margin = _draw(
            rows,
            [params[i] for i in drawn],
            [positions[i] for i in drawn],
            noise_ids,
            rivals_within or 0.0,
        )
        if confidence is not None:
            confidence[index] = margin
    return SampledTokens(
        tokens.where(is_valid, INVALID).tolist(), [] if confidence is None else confidence.tolist()
    )


def _draw(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    noise_ids: torch.Tensor | None,
    rivals_within: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's winner, and its share of the exponentials of all scores not far below its own."""
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
    rows, tokens = likely_winners(logits, floors, best_score - rivals_within, keys, noise_ids)
    scores = logits[rows, tokens].to(torch.float64) + gumbel_noise(keys[rows], noise_ids[tokens])
    best_score.scatter_reduce_(0, rows, scores, "amax")
    winners = scores == best_score[rows]
    winner = likeliest.clone()
    # Of equal scores the smallest id wins.
    winner.scatter_reduce_(0, rows[winners], tokens[winners], "amin", include_self=False)
    rivalry = torch.zeros_like(best_score)
    rivalry.scatter_add_(0, rows, (scores - best_score[rows]).exp())
    return winner, 1.0 / rivalry
