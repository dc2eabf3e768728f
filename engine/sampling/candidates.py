"""Which tokens can win the Gumbel-max draw, found without everybody's Gumbel noise.

A token whose logit is `lead` above the score to beat wins only if its noise is at least -lead.
Gumbel noise -log(-log u) is at most -log(1 - u), so a winner has 1 - u <= exp(lead): of a whole
vocabulary some ten tokens, told by a hash and an exponential.
"""

from __future__ import annotations

import torch

from engine.kernels import load_native, native_available
from engine.sampling.noise import MAX_NOISE, UNIFORM_BITS, uniform_bits

_MARGIN = 1.0 + 1e-5
"""For the rounding of float32."""


def likely_winners(
    logits: torch.Tensor,
    floors: torch.Tensor,
    score_to_beat: torch.Tensor,
    keys: torch.Tensor,
    noise_ids: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and columns of the tokens that may reach the score to beat, and of few others.

    Args:
        logits: float32[N, V].
        floors: float32[N], the smallest logit that may win in each row; often -inf.
        score_to_beat: float64[N], a token's logit with its noise.
        keys: int64[N], see `row_keys`.
        noise_ids: int64[V], under which id each column draws its noise.
    """
    # No token's noise exceeds MAX_NOISE.
    lowest = torch.maximum(floors, (score_to_beat - MAX_NOISE).float() - 1e-3)
    if logits.is_cuda or native_available() is not None:
        return _by_torch(logits, lowest, score_to_beat, keys, noise_ids)
    rows, columns = load_native().likely_winners(
        "",
        logits.numpy(),
        lowest.numpy(),
        score_to_beat.float().numpy(),
        keys.numpy(),
        noise_ids.numpy(),
    )
    return torch.from_numpy(rows), torch.from_numpy(columns)


def _by_torch(
    logits: torch.Tensor,
    lowest: torch.Tensor,
    score_to_beat: torch.Tensor,
    keys: torch.Tensor,
    noise_ids: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = (logits >= lowest[:, None]).nonzero(as_tuple=True)
    lead = logits[rows, columns] - score_to_beat[rows]
    misses = (1 << UNIFORM_BITS) - 1 - uniform_bits(keys[rows], noise_ids[columns])
    may_win = misses <= _MARGIN * lead.exp() * 2.0**UNIFORM_BITS
    return rows[may_win], columns[may_win]
