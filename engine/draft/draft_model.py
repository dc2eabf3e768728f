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
from engine.sampling.coupling import CoupledChooser, InvalidDraftLogitsError
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
class DraftTokens:
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
    def num_missing(self) -> int:
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
class DraftWish:
    """How far to draft for one request."""

    length: int
    """Draft tokens wanted at most."""
    least_certainty: float = 0.0
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
        self._holders: list[DraftTokens] = []
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

    def read(self, token_ids: Sequence[int], scope: str = "") -> DraftPrompt:
        """What `start` needs to know of a prompt; may be called from any thread.

        Args:
            scope: cache scope; prompts of different ones share no blocks.
        """
        hashes: list[bytes] = []
        extend_block_hashes(hashes, token_ids, self._pool.block_size, len(token_ids), scope)
        is_known = 0 <= max(token_ids, default=-1) < self.vocab_size
        return DraftPrompt(tuple(token_ids), tuple(hashes), is_known)

    def start(self, prompt: DraftPrompt) -> DraftTokens:
        """Take up a request, reusing the blocks of an equal prefix of the same cache scope."""
        num_prompt = len(prompt.token_ids)
        tokens = DraftTokens(list(prompt.token_ids), num_prompt, prompt.block_hashes)
        # The last token is always computed: its logits are needed.
        num_reusable = max(0, num_prompt - 1) // self._pool.block_size
        tokens.block_ids = self._pool.match_prefix(prompt.block_hashes[:num_reusable])
        tokens.num_published = len(tokens.block_ids)
        tokens.num_computed = len(tokens.block_ids) * self._pool.block_size
        self._holders.append(tokens)
        return tokens

    def drop(self, tokens: DraftTokens) -> None:
        """Free a request's blocks for good."""
        self._release(tokens)
        self._holders = [holder for holder in self._holders if holder is not tokens]

    def has_room(self, num_tokens: int) -> bool:
        """Whether that many tokens of one request fit the draft model's context and cache."""
        return num_tokens <= self._max_context

    def exceeds_step(self, tokens: DraftTokens) -> bool:
        """Whether more is missing than one forward pass computes; see `catch_up`."""
        return tokens.num_missing > self._max_step_tokens

    def catch_up(self, requests: Sequence[DraftTokens]) -> None:
        """Compute missing tokens of long prompts, one forward pass at most, all but the last."""
        chunks: list[tuple[DraftTokens, Chunk]] = []
        budget = self._max_step_tokens
        for tokens in requests:
            count = min(tokens.num_missing - 1, budget)
            if count > 0 and self._reserve(tokens, tokens.num_computed + count, requests):
                budget -= count
                chunks.append((tokens, self._chunk(tokens, count, wants_logits=False)))
        if chunks:
            self.runner.execute(StepPlan(tuple(chunk for _, chunk in chunks)))
            for tokens, chunk in chunks:
                self._advance(tokens, chunk.end)

    def draft(
        self,
        requests: Sequence[DraftTokens],
        wishes: Sequence[DraftWish],
        chooser: CoupledChooser,
        stop_ids: frozenset[int],
    ) -> list[list[int]]:
        """Append a continuation to each request's tokens.

        Args:
            requests: a request that misses more than a step's budget gets nothing this time.
            wishes: how far to go, one entry a request.
            chooser: turns the draft model's logits into tokens.
            stop_ids: a continuation ends with one of these.

        Returns:
            The appended tokens; empty where blocks or budget did not suffice.

        Raises:
            InvalidDraftLogitsError: the model computed no numbers for some request. Nobody reuses
                what it computed for that one.
        """
        drafted: list[list[int]] = [[] for _ in requests]
        certainty = [1.0] * len(requests)
        active = self._startable(requests, wishes)
        depth = 0
        while active:
            plan = StepPlan(
                tuple(
                    self._chunk(requests[i], requests[i].num_missing, wants_logits=True)
                    for i in active
                )
            )
            began = time.perf_counter()
            logits = self.runner.execute(plan)
            try:
                chosen, confidences = chooser.choose(logits, active, depth)
            except InvalidDraftLogitsError as error:
                for row in error.rows:
                    self._distrust(requests[active[row]])
                raise
            self.cost.observe(plan.num_tokens, time.perf_counter() - began)
            for i, token_id, confidence in zip(active, chosen, confidences, strict=True):
                tokens = requests[i]
                self._advance(tokens, len(tokens.token_ids))
                tokens.token_ids.append(token_id)
                drafted[i].append(token_id)
                certainty[i] *= confidence
            depth += 1
            active = [
                i
                for i in active
                if depth < wishes[i].length
                and certainty[i] >= wishes[i].least_certainty
                and drafted[i][-1] not in stop_ids
            ]
        return drafted

    def _startable(self, requests: Sequence[DraftTokens], wishes: Sequence[DraftWish]) -> list[int]:
        budget = self._max_step_tokens
        startable = []
        for index, (tokens, wish) in enumerate(zip(requests, wishes, strict=True)):
            count = tokens.num_missing
            end = len(tokens.token_ids) + wish.length
            if count <= budget and wish.length > 0 and self._reserve(tokens, end, requests):
                budget -= count
                startable.append(index)
        return startable

    def _chunk(self, tokens: DraftTokens, count: int, *, wants_logits: bool) -> Chunk:
        start = tokens.num_computed
        blocks = self._pool.blocks_for(start + count)
        return Chunk(
            request_id="",
            start=start,
            token_ids=np.asarray(tokens.token_ids[start : start + count], np.int32),
            block_ids=tuple(tokens.block_ids[:blocks]),
            first_logit=count - 1 if wants_logits else count,
        )

    def _advance(self, tokens: DraftTokens, num_computed: int) -> None:
        tokens.num_computed = num_computed
        num_full = min(num_computed, tokens.num_prompt) // self._pool.block_size
        for index in range(tokens.num_published, num_full):
            self._pool.publish(tokens.block_ids[index], tokens.block_hashes[index])
        tokens.num_published = max(tokens.num_published, num_full)

    def _reserve(self, tokens: DraftTokens, num_tokens: int, in_use: Sequence[DraftTokens]) -> bool:
        tokens.last_used = next(self._uses)
        missing = self._pool.blocks_for(num_tokens) - len(tokens.block_ids)
        while missing > self._pool.num_free:
            idle = [
                holder
                for holder in self._holders
                if holder.block_ids and not any(holder is user for user in in_use)
            ]
            if not idle:
                return False
            self._release(min(idle, key=lambda holder: holder.last_used))
        if missing > 0:
            tokens.block_ids.extend(self._pool.allocate(missing) or ())
        return True

    def _distrust(self, tokens: DraftTokens) -> None:
        self._pool.withdraw(tokens.block_ids)
        self._release(tokens)

    def _release(self, tokens: DraftTokens) -> None:
        self._pool.release(tokens.block_ids)
        tokens.block_ids = []
        tokens.num_computed = 0
        tokens.num_published = 0
