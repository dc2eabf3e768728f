"""A draft model's choices, coupled to the target's by shared noise."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.sampling.sampler import INVALID, sample_with_certainty
from engine.scheduling.sequence import TokenSequence


class InvalidDraftLogitsError(ArithmeticError):
    """A draft model's logits are no numbers.

    Attributes:
        rows: those concerned.
    """

    def __init__(self, rows: Sequence[int]) -> None:
        super().__init__("the draft model computes invalid logits")
        self.rows = tuple(rows)


class CoupledChooser:
    """Chooses draft tokens for a batch of requests.

    At temperature 0 the likeliest token, else a sample from the draft's distribution, tempered and
    truncated as the request says, drawn with the noise the target will use at that position.
    """

    def __init__(
        self, sequences: Sequence[TokenSequence], noise_ids: torch.Tensor | None = None
    ) -> None:
        """
        Args:
            sequences: one request for each draft of the batch.
            noise_ids: int64[V], the target's id of each draft token.
        """
        self._params = [sequence.params for sequence in sequences]
        self._positions = [sequence.num_output for sequence in sequences]
        self._noise_ids = noise_ids

    def choose(
        self, logits: torch.Tensor, members: Sequence[int], depth: int
    ) -> tuple[list[int], list[float]]:
        """Tokens and how certain the draft is that the target chooses them too.

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
        choices = sample_with_certainty(logits, params, positions, noise_ids)
        invalid = [row for row, token_id in enumerate(choices.token_ids) if token_id == INVALID]
        if invalid:
            raise InvalidDraftLogitsError(invalid)
        return choices.token_ids, choices.certainties
