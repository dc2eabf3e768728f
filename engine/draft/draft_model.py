"""DraftModel: a small model that continues many token lists at once, over its own KV blocks."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.draft.cost import CostModel
from engine.models.runner import ModelRunner
from engine.models.warm_up import time_passes
from engine.plan import Chunk, StepPlan
from engine.sampling.coupling import CoupledSampler, InvalidDraftLogitsError
from engine.scheduling.blocks import BlockPool, extend_block_hashes

_WARM_UP_ROWS = (1, 1, 1, 4)


@dataclass(frozen=True, slots=True)
class DraftPrompt:
    """A prompt in the draft model's tokens."""

    token_ids: tuple[int, ...]
    block_hashes: tuple[bytes, ...]
    """Of the full blocks, for the draft's prefix cache."""
    is_known: bool
    """Whether there is one, and the model has all its tokens."""


@dataclass(slots=True)
class DraftSequence:
    """The draft model's view of one request: its tokens, of which the first have K and V."""

    token_ids: list[int]
    num_prompt: int
    """Leading tokens that never change; their full blocks go into the prefix cache."""
    block_hashes: tuple[bytes, ...]
    num_computed: int = 0
    block_ids: list[int] = field(default_factory=list)
    num_published: int = 0
    last_used: int = 0

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed

    def rewrite(self, start: int, new_ids: Sequence[int]) -> None:
        """Replace everything from `start` on, keeping the K and V of what stays the same."""
        old = self.token_ids[start:]
        same = 0
        for before, after in zip(old, new_ids, strict=False):
            if before != after:
                break
            same += 1
        del self.token_ids[start + same :]
        self.token_ids.extend(new_ids[same:])
        # The last token is always computed anew: its logits begin the next draft.
        self.num_computed = min(self.num_computed, start + same, len(self.token_ids) - 1)


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """How far to draft for one request."""

    max_tokens: int
    min_confidence: float = 0.0
    """Stop once the draft model gives all its tokens together less probability than this."""


class DraftModel:
    """Runs the draft model's forward passes for all requests together.

    When its blocks run out, whoever was used least recently loses its K and V and recomputes them
    when it comes back; when that is not enough a request gets no draft.
    """

    def __init__(self, runner: ModelRunner, *, max_context: int, max_step_tokens: int) -> None:
        self.cost = CostModel()
        self.runner = runner
        self._pool = BlockPool(runner.num_blocks, runner.block_size)
        self._max_context = min(max_context, runner.num_blocks * runner.block_size)
        self._max_step_tokens = max_step_tokens
        self._sequences: list[DraftSequence] = []
        self._uses = itertools.count(1)

    @property
    def vocab_size(self) -> int:
        """Width of the draft model's logits."""
        return self.runner.info.vocab_size

    @property
    def pool(self) -> BlockPool:
        return self._pool

    def warm_up(self) -> None:
        """Make a few passes on blocks that nobody holds yet, to learn what passes cost."""
        for rows, seconds in time_passes(self.runner, _WARM_UP_ROWS):
            self.cost.observe(rows, seconds)

    def prepare_prompt(self, token_ids: Sequence[int], scope: str = "") -> DraftPrompt:
        """What `start` needs to know of a prompt; may be called from any thread.

        Args:
            scope: cache scope; prompts of different ones share no blocks.
        """
        hashes: list[bytes] = []
        extend_block_hashes(hashes, token_ids, self._pool.block_size, len(token_ids), scope)
        is_known = 0 <= max(token_ids, default=-1) < self.vocab_size
        return DraftPrompt(tuple(token_ids), tuple(hashes), is_known)

    def start(self, prompt: DraftPrompt) -> DraftSequence:
        """Take up a request, reusing the blocks of an equal prefix of the same cache scope."""
        num_prompt = len(prompt.token_ids)
        sequence = DraftSequence(list(prompt.token_ids), num_prompt, prompt.block_hashes)
        # The last token is always computed: its logits are needed.
        num_reusable = max(0, num_prompt - 1) // self._pool.block_size
        sequence.block_ids = self._pool.match_prefix(prompt.block_hashes[:num_reusable])
        sequence.num_published = len(sequence.block_ids)
        sequence.num_computed = len(sequence.block_ids) * self._pool.block_size
        self._sequences.append(sequence)
        return sequence

    def free(self, sequence: DraftSequence) -> None:
        """Free a request's blocks for good."""
        self._release(sequence)
        self._sequences = [other for other in self._sequences if other is not sequence]

    def has_room(self, num_tokens: int) -> bool:
        """Whether that many tokens of one request fit the draft model's context and cache."""
        return num_tokens <= self._max_context

    def needs_prefill(self, sequence: DraftSequence) -> bool:
        """Whether more is missing than one forward pass computes; see `prefill`."""
        return sequence.num_uncomputed_tokens > self._max_step_tokens

    def prefill(self, sequences: Sequence[DraftSequence]) -> None:
        """Compute missing tokens of long prompts, one forward pass at most, all but the last."""
        chunks: list[tuple[DraftSequence, Chunk]] = []
        budget = self._max_step_tokens
        for sequence in sequences:
            count = min(sequence.num_uncomputed_tokens - 1, budget)
            if count > 0 and self._reserve(sequence, sequence.num_computed + count, sequences):
                budget -= count
                chunks.append((sequence, self._chunk(sequence, count, wants_logits=False)))
        if chunks:
            self.runner.execute(StepPlan(tuple(chunk for _, chunk in chunks)))
            for sequence, chunk in chunks:
                self._advance(sequence, chunk.end)

    def draft(
        self,
        sequences: Sequence[DraftSequence],
        limits: Sequence[DraftLimits],
        sampler: CoupledSampler,
        stop_ids: frozenset[int],
    ) -> list[list[int]]:
        """Append a continuation to each sequence.

        Args:
            sequences: one that misses more than a step's budget gets nothing this time.
            limits: how far to go, one entry a sequence.
            sampler: turns the draft model's logits into tokens.
            stop_ids: a continuation ends with one of these.

        Returns:
            The appended tokens; empty where blocks or budget did not suffice.

        Raises:
            InvalidDraftLogitsError: the model computed no numbers for some sequence. Nobody reuses
                what it computed for that one.
        """
        drafted: list[list[int]] = [[] for _ in sequences]
        confidence = [1.0] * len(sequences)
        active = self._startable(sequences, limits)
        depth = 0
        while active:
            chosen, confidences = self._sample_next(
                [sequences[i] for i in active], active, depth, sampler
            )
            for i, token_id, of_token in zip(active, chosen, confidences, strict=True):
                sequences[i].token_ids.append(token_id)
                drafted[i].append(token_id)
                confidence[i] *= of_token
            depth += 1
            active = [
                i
                for i in active
                if depth < limits[i].max_tokens
                and confidence[i] >= limits[i].min_confidence
                and drafted[i][-1] not in stop_ids
            ]
        return drafted

    def _sample_next(
        self,
        sequences: Sequence[DraftSequence],
        members: Sequence[int],
        depth: int,
        sampler: CoupledSampler,
    ) -> tuple[list[int], list[float]]:
        """One forward pass: a next token for each sequence, and its confidence.

        Args:
            members: which drafts of the sampler's batch the sequences are.
            depth: tokens drafted before this one.
        """
        plan = StepPlan(
            tuple(self._chunk(s, s.num_uncomputed_tokens, wants_logits=True) for s in sequences)
        )
        began = time.perf_counter()
        logits = self.runner.execute(plan)
        try:
            sampled = sampler.sample(logits, members, depth)
        except InvalidDraftLogitsError as error:
            for row in error.rows:
                self._invalidate(sequences[row])
            raise
        self.cost.observe(plan.num_tokens, time.perf_counter() - began)
        for sequence in sequences:
            self._advance(sequence, len(sequence.token_ids))
        return sampled

    def _startable(
        self, sequences: Sequence[DraftSequence], limits: Sequence[DraftLimits]
    ) -> list[int]:
        """Indexes of the sequences that step budget and blocks suffice for."""
        budget = self._max_step_tokens
        startable = []
        for index, (sequence, limit) in enumerate(zip(sequences, limits, strict=True)):
            count = sequence.num_uncomputed_tokens
            end = len(sequence.token_ids) + limit.max_tokens
            if count <= budget and limit.max_tokens > 0 and self._reserve(sequence, end, sequences):
                budget -= count
                startable.append(index)
        return startable

    def _chunk(self, sequence: DraftSequence, count: int, *, wants_logits: bool) -> Chunk:
        start = sequence.num_computed
        blocks = self._pool.blocks_for(start + count)
        return Chunk(
            request_id="",
            start=start,
            token_ids=np.asarray(sequence.token_ids[start : start + count], np.int32),
            block_ids=tuple(sequence.block_ids[:blocks]),
            first_logit=count - 1 if wants_logits else count,
        )

    def _advance(self, sequence: DraftSequence, num_computed: int) -> None:
        sequence.num_computed = num_computed
        num_full = min(num_computed, sequence.num_prompt) // self._pool.block_size
        for index in range(sequence.num_published, num_full):
            self._pool.publish(sequence.block_ids[index], sequence.block_hashes[index])
        sequence.num_published = max(sequence.num_published, num_full)

    def _reserve(
        self, sequence: DraftSequence, num_tokens: int, in_use: Sequence[DraftSequence]
    ) -> bool:
        sequence.last_used = next(self._uses)
        missing = self._pool.blocks_for(num_tokens) - len(sequence.block_ids)
        while missing > self._pool.num_free:
            idle = [
                other
                for other in self._sequences
                if other.block_ids and not any(other is user for user in in_use)
            ]
            if not idle:
                return False
            self._release(min(idle, key=lambda other: other.last_used))
        if missing > 0:
            sequence.block_ids.extend(self._pool.allocate(missing) or ())
        return True

    def _invalidate(self, sequence: DraftSequence) -> None:
        self._pool.withdraw(sequence.block_ids)
        self._release(sequence)

    def _release(self, sequence: DraftSequence) -> None:
        self._pool.release(sequence.block_ids)
        sequence.block_ids = []
        sequence.num_computed = 0
        sequence.num_published = 0
