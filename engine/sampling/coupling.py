"""Coupled noise: a draft model samples with the noise that the target will sample with.

See `engine.sampling.noise` for why the two then agree so often.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.sampling.sampler import INVALID, sample_with_confidence
from engine.scheduling.sequence import TokenSequence


class InvalidDraftLogitsError(ArithmeticError):
    """A draft model's logits are no numbers.

    Attributes:
        rows: those concerned.
    """

    def __init__(self, rows: Sequence[int]) -> None:
        super().__init__("the draft model computes invalid logits")
        self.rows = tuple(rows)


class CoupledSampler:
    """Samples draft tokens for a batch of requests.

    At temperature 0 the likeliest token, else a sample from the draft's distribution, tempered and
    truncated as the request says, drawn with the noise the target will use at that position.
    """

    def __init__(
        self, sequences: Sequence[TokenSequence], noise_ids: torch.Tensor | None = None
    ) -> None:
        """
        Args:
            sequences: one request for each draft of the batch.
            noise_ids: int64[V], the target's id of each draft token (see `noise_ids_of`); default:
                the same ids.
        """
        self._params = [sequence.params for sequence in sequences]
        self._positions = [sequence.num_output for sequence in sequences]
        self._noise_ids = noise_ids

    def sample(
        self, logits: torch.Tensor, members: Sequence[int], depth: int
    ) -> tuple[list[int], list[float]]:
        """Tokens and how confident the draft is that the target samples them too.

        Args:
            logits: float32[len(members), V] of the draft model.
            members: which drafts of the batch the rows belong to.
            depth: tokens drafted before this one.

        Raises:
            InvalidDraftLogitsError: logits are no numbers.
        """
        params = [self._params[i] for i in members]
        positions = [self._positions[i] + depth for i in members]
        noise_ids = None if self._noise_ids is None else self._noise_ids.to(logits.device)
        sampled = sample_with_confidence(logits, params, positions, noise_ids)
        invalid = [row for row, token_id in enumerate(sampled.token_ids) if token_id == INVALID]
        if invalid:
            raise InvalidDraftLogitsError(invalid)
        return sampled.token_ids, sampled.confidences


def noise_ids_of(
    aligned_ids: Sequence[int | None], *, vocab_size: int, num_target_ids: int
) -> torch.Tensor:
    """Under which id each draft token draws its noise: the target's id where the target has it.

    Args:
        aligned_ids: for each draft id the target's of the same bytes, or None.
        vocab_size: width of the draft model's logits.
        num_target_ids: tokens the target lacks get ids of their own from here on.

    Returns:
        int64[vocab_size].
    """
    ids = torch.arange(vocab_size) + num_target_ids
    for token_id, target_id in enumerate(aligned_ids[:vocab_size]):
        if target_id is not None:
            ids[token_id] = target_id
    return ids
