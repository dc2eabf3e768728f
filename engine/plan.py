"""StepPlan and StepResult: the contract between scheduler, runner and verifier.

Small, plain and picklable, so that a plan can be broadcast to other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from engine.request import TokenLogprob

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Chunk:
    """The consecutive tokens of one request that a step computes."""

    request_id: str
    start: int
    """Position of the first token; the request's KV holds exactly the positions below it."""
    token_ids: Int32Array
    """int32[n]: committed tokens, then `num_draft` draft tokens."""
    block_ids: tuple[int, ...]
    """KV blocks of positions 0 .. start + n - 1, in order."""
    num_draft: int = 0
    first_logit: int = 0
    """Rows first_logit .. n - 1 need logits (n: none of them does)."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def num_logits(self) -> int:
        return len(self.token_ids) - self.first_logit

    def with_draft(self, num_draft: int) -> Chunk:
        """The chunk with only the first `num_draft` of its draft tokens."""
        if num_draft == self.num_draft:
            return self
        num_tokens = self.num_tokens - self.num_draft + num_draft
        return replace(self, token_ids=self.token_ids[:num_tokens], num_draft=num_draft)


def roll_back(chunk: Chunk, num_accepted: int) -> Chunk:
    """A computed chunk without the draft tokens that were rejected.

    Nothing is undone in the KV cache. The sequence advances to the end of the chunk that is left,
    and the next step starts there: its keys and values overwrite the stale slots of the rejected
    tokens before anything attends to them.
    """
    return chunk.with_draft(num_accepted)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass: every chunk is computed together."""

    chunks: tuple[Chunk, ...]

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def num_draft_tokens(self) -> int:
        return sum(chunk.num_draft for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class PackedStep:
    """A plan as flat arrays: T tokens of R chunks in one row, L of them with logits.

    Attributes:
        token_ids: int32[T]
        positions: int32[T]
        slots: int64[T], where each token's K and V go: block id * block size + offset.
        query_starts: int32[R + 1], chunk r has rows query_starts[r] .. query_starts[r + 1] - 1.
        context_lens: int32[R], tokens each chunk attends to, its own included.
        block_tables: int32[R, B], padded with 0.
        logit_rows: int32[L], rows that need logits, ascending.
    """

    token_ids: Int32Array
    positions: Int32Array
    slots: Int64Array
    query_starts: Int32Array
    context_lens: Int32Array
    block_tables: Int32Array
    logit_rows: Int32Array


def pack(plan: StepPlan, block_size: int) -> PackedStep:
    """Flatten a plan for a runner whose KV blocks hold `block_size` tokens."""
    chunks = plan.chunks
    lengths = np.fromiter((chunk.num_tokens for chunk in chunks), np.int32, len(chunks))
    starts = np.fromiter((chunk.start for chunk in chunks), np.int32, len(chunks))
    query_starts = np.zeros(len(chunks) + 1, np.int32)
    np.cumsum(lengths, out=query_starts[1:])
    block_tables = np.zeros((len(chunks), max(len(chunk.block_ids) for chunk in chunks)), np.int32)
    for row, chunk in enumerate(chunks):
        block_tables[row, : len(chunk.block_ids)] = chunk.block_ids
    owner = np.repeat(np.arange(len(chunks), dtype=np.int32), lengths)
    offsets = np.arange(query_starts[-1], dtype=np.int32) - query_starts[owner]
    positions = starts[owner] + offsets
    blocks = block_tables[owner, positions // block_size].astype(np.int64)
    first_logits = np.fromiter((chunk.first_logit for chunk in chunks), np.int32, len(chunks))
    return PackedStep(
        token_ids=np.concatenate([chunk.token_ids for chunk in chunks]).astype(
            np.int32, copy=False
        ),
        positions=positions,
        slots=blocks * block_size + positions % block_size,
        query_starts=query_starts,
        context_lens=starts + lengths,
        block_tables=block_tables,
        logit_rows=np.flatnonzero(offsets >= first_logits[owner]).astype(np.int32),
    )


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """What the target says to one chunk.

    `token_ids` is empty for a chunk that ends inside the prompt; else it holds the accepted draft
    tokens and one token of the target's own.
    """

    token_ids: tuple[int, ...]
    num_accepted: int = 0
    num_lossy: int = 0
    """Accepted draft tokens that are not the target's own choice (lossy acceptance only)."""
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    error: str | None = None
    """Why no token can follow; then `token_ids` is empty and the request is over."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results in the order of the plan's chunks."""

    chunks: Sequence[ChunkResult]
