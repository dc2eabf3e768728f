"""Log-probabilities of chosen tokens and their likeliest alternatives."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.request import TokenLogprob


def token_logprobs(
    logits: torch.Tensor,
    token_ids: Sequence[int],
    num_top: Sequence[int],
    token_bytes: Sequence[bytes],
) -> list[TokenLogprob]:
    """Log-probabilities from unprocessed logits.

    Args:
        logits: float32[N, V], as the model gave them.
        token_ids: the chosen token of each row.
        num_top: alternatives to list for each row.
        token_bytes: bytes by token id; ids beyond it (a padded vocabulary) have none.
    """
    values = logits.log_softmax(dim=1)
    chosen = values.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])[:, 0].tolist()
    width = max(num_top, default=0)
    top = values.topk(width, dim=1) if width else None
    top_ids = top.indices.tolist() if top else [[]] * len(token_ids)
    top_values = top.values.tolist() if top else [[]] * len(token_ids)

    def piece(token_id: int) -> bytes:
        return token_bytes[token_id] if token_id < len(token_bytes) else b""

    return [
        TokenLogprob(
            token_id=token_id,
            token_bytes=piece(token_id),
            logprob=logprob,
            top=tuple((i, piece(i), v) for i, v in zip(ids[:count], row[:count], strict=True)),
        )
        for token_id, logprob, ids, row, count in zip(
            token_ids, chosen, top_ids, top_values, num_top, strict=True
        )
    ]
