"""TokenSequence: one request's tokens, KV blocks and progress."""

from __future__ import annotations

from enum import StrEnum

from engine.preparation import NOT_PREPARED, Preparation
from engine.request import GenerationRequest, SamplingParams


class SequenceStatus(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class TokenSequence:
    """Tokens, computed KV and blocks of one request. Changed only by the scheduler."""

    __slots__ = (
        "arrival_time",
        "block_hashes",
        "block_ids",
        "first_scheduled_time",
        "num_cached",
        "num_computed",
        "num_prompt",
        "num_published",
        "num_scored",
        "preparation",
        "request",
        "status",
        "token_ids",
    )

    def __init__(
        self,
        request: GenerationRequest,
        arrival_time: float,
        preparation: Preparation = NOT_PREPARED,
    ) -> None:
        self.request = request
        self.preparation = preparation
        self.arrival_time = arrival_time
        self.first_scheduled_time: float | None = None
        self.token_ids: list[int] = list(request.prompt_token_ids)
        """Prompt and committed output."""
        self.num_prompt = len(self.token_ids)
        self.num_computed = 0
        """Positions whose K and V are in the cache."""
        self.num_cached = 0
        """Prompt tokens the prefix cache supplied at the first admission."""
        self.num_scored = 0
        """Prompt positions whose logits have been used for prompt logprobs."""
        self.block_ids: list[int] = []
        self.block_hashes = list(preparation.block_hashes)
        self.num_published = 0
        """Leading blocks that the prefix cache knows."""
        self.status = SequenceStatus.WAITING

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_output_left(self) -> int:
        """Output tokens that may still be committed."""
        return self.params.max_tokens - self.num_output

    @property
    def is_decoding(self) -> bool:
        """Whether only the last committed token is missing from the KV cache.

        True also of a one-token prompt: its first step is a decode step like any other.
        """
        return self.num_computed == len(self.token_ids) - 1

    @property
    def needs_prompt_scores(self) -> bool:
        """Whether prompt positions still wait for their logits to be turned into logprobs."""
        return self.params.prompt_logprobs is not None and self.num_scored < self.num_prompt
