"""Scheduler: continuous batching; chooses, each step, which tokens of which sequences to compute.

There is no prefill phase and no decode phase. A sequence has `num_computed` tokens in the KV
cache and wants its tokens plus its draft computed; a step gives it a chunk of those. The idea is
that of vLLM's v1 scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from engine.plan import Chunk, StepPlan
from engine.preparation import NOT_PREPARED, Preparation
from engine.request import GenerationRequest
from engine.scheduling.blocks import BlockPool, extend_block_hashes
from engine.scheduling.sequence import SequenceStatus, TokenSequence
from engine.scheduling.waiting import WaitingQueue


@dataclass(slots=True)
class SchedulerCounters:
    """What the scheduler has done so far."""

    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0


@dataclass(slots=True)
class _Step:
    """A plan in the making."""

    tokens_left: int
    prefill_left: int
    num_scheduled: dict[str, int] = field(default_factory=dict)
    """Committed tokens to compute, by request id."""
    drafts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    preempted: bool = False

    def schedule(self, sequence: TokenSequence, num_tokens: int) -> None:
        self.tokens_left -= num_tokens
        self.num_scheduled[sequence.request_id] = num_tokens

    def unschedule(self, sequence: TokenSequence) -> None:
        self.tokens_left += self.num_scheduled.pop(sequence.request_id, 0)


class Scheduler:
    """Owns the waiting and running sequences and their KV blocks.

    Sequences wait in the order of `WaitingQueue`. Each step first schedules every decoding
    sequence's one token, then prompt tokens up to the prefill chunk, then draft tokens; a draft
    never costs another sequence its turn. When blocks run out a running sequence is preempted, in
    the order of `_next_to_preempt`, and recomputed later.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_running: int,
        max_step_tokens: int,
        prefill_chunk: int,
        clock: Callable[[], float],
    ) -> None:
        if max_step_tokens < max_running + prefill_chunk:
            raise ValueError("max_step_tokens must be at least max_running + prefill_chunk")
        self.pool = pool
        self.counters = SchedulerCounters()
        self._max_running = max_running
        self._max_step_tokens = max_step_tokens
        self._prefill_chunk = prefill_chunk
        self._clock = clock
        self._sequences: dict[str, TokenSequence] = {}
        self._waiting = WaitingQueue()
        self._running: list[TokenSequence] = []

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    @property
    def running(self) -> tuple[TokenSequence, ...]:
        """Running sequences, oldest first."""
        return tuple(self._running)

    @property
    def num_prompt_rows_due(self) -> int:
        """Prompt tokens the next step is going to compute, about."""
        due = sum(s.num_tokens - s.num_computed for s in self._running if not s.is_decoding)
        if self._waiting and len(self._running) < self._max_running:
            due += self._waiting.peek().num_tokens
        return min(due, self._prefill_chunk)

    def __getitem__(self, request_id: str) -> TokenSequence:
        return self._sequences[request_id]

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sequences

    def add(
        self, request: GenerationRequest, preparation: Preparation = NOT_PREPARED
    ) -> TokenSequence:
        """Queue a request whose prompt and max_tokens fit the pool."""
        sequence = TokenSequence(request, self._clock(), preparation)
        self._sequences[request.request_id] = sequence
        self._waiting.add(sequence)
        return sequence

    def overdue(self, now: float) -> list[str]:
        """Ids of requests that have waited longer than they may; finish them."""
        return self._waiting.overdue(now)

    @property
    def waiting(self) -> tuple[TokenSequence, ...]:
        """Waiting sequences, oldest first."""
        return tuple(sorted(self._waiting, key=lambda sequence: sequence.arrival_time))

    def requeue(self, sequence: TokenSequence) -> None:
        """Queue a waiting sequence of another scheduler, which is used no more."""
        sequence.block_ids = []
        sequence.num_computed = 0
        sequence.num_published = 0
        self._sequences[sequence.request_id] = sequence
        self._waiting.add(sequence)

    def invalidate(self, request_id: str) -> None:
        """Let nobody reuse what a sequence has computed."""
        self.pool.withdraw(self._sequences[request_id].block_ids)

    def finish(self, request_id: str) -> None:
        """Forget a sequence, finished or aborted, and free its blocks."""
        sequence = self._sequences.pop(request_id)
        if sequence.status is SequenceStatus.RUNNING:
            self._running.remove(sequence)
            self._waiting.note_end(sequence)
        else:
            self._waiting.discard(sequence)
        self._free_blocks(sequence)
        sequence.status = SequenceStatus.FINISHED

    def schedule(self, drafts: Mapping[str, tuple[int, ...]]) -> StepPlan:
        """Choose the next step's chunks.

        Args:
            drafts: proposed draft tokens by request id; cut to the budget, to what the request
                may still produce and to the free blocks.
        """
        step = _Step(self._max_step_tokens, self._prefill_chunk)
        self._schedule_decoding(step)
        self._schedule_prefill(step)
        if not step.preempted:
            self._admit(step)
        self._schedule_drafts(step, drafts)
        return StepPlan(
            tuple(self._chunk(s, step) for s in self._running if s.request_id in step.num_scheduled)
        )

    def commit(self, chunk: Chunk, token_ids: tuple[int, ...]) -> None:
        """Advance a sequence by a computed chunk.

        Args:
            chunk: what `roll_back` has left of it: its draft tokens are all in `token_ids`.
            token_ids: tokens to append: accepted draft tokens and one of the target's own, possibly
                cut short by a stop; empty for a chunk that ended inside the prompt.
        """
        sequence = self._sequences[chunk.request_id]
        sequence.token_ids.extend(token_ids)
        self._waiting.note_output(sequence, len(token_ids))
        sequence.num_computed = chunk.end
        if sequence.params.prompt_logprobs is not None:
            sequence.num_scored = max(sequence.num_scored, min(chunk.end, sequence.num_prompt))
        self._publish(sequence)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless block ownership adds up (every block, not only when idle)."""
        self.pool.check_integrity()
        if not self._sequences and self.pool.num_free != self.pool.num_blocks:
            raise RuntimeError("KV blocks are held though no request is left")
        if any(s.block_ids for s in self._waiting):
            raise RuntimeError("a waiting request holds KV blocks")

    def _schedule_decoding(self, step: _Step) -> None:
        for sequence in tuple(self._running):
            while sequence.status is SequenceStatus.RUNNING and sequence.is_decoding:
                if self._extend_blocks(sequence, sequence.num_tokens):
                    step.schedule(sequence, 1)
                    break
                self._preempt(self._next_to_preempt(), step)

    def _schedule_prefill(self, step: _Step) -> None:
        for sequence in self._running:
            if sequence.request_id not in step.num_scheduled:
                self._schedule_prompt(sequence, step)

    def _admit(self, step: _Step) -> None:
        while self._waiting and len(self._running) < self._max_running and step.prefill_left > 0:
            sequence = self._waiting.peek()
            self._match_prefix(sequence)
            if not self._extend_blocks(sequence, sequence.num_tokens):
                self._free_blocks(sequence)
                return
            self._waiting.pop()
            self._running.append(sequence)
            sequence.status = SequenceStatus.RUNNING
            self._note_admission(sequence)
            self._schedule_prompt(sequence, step)

    def _schedule_prompt(self, sequence: TokenSequence, step: _Step) -> None:
        count = min(sequence.num_tokens - sequence.num_computed, step.prefill_left)
        if count > 0:
            step.prefill_left -= count
            step.schedule(sequence, count)

    def _schedule_drafts(self, step: _Step, drafts: Mapping[str, tuple[int, ...]]) -> None:
        """Cut drafts to the room there is; the policy has chosen their length (`engine.draft`)."""
        for sequence in self._running:
            draft = drafts.get(sequence.request_id, ())
            if (
                not draft
                or not sequence.is_decoding
                or sequence.request_id not in step.num_scheduled
            ):
                continue
            count = min(len(draft), step.tokens_left, sequence.num_output_left - 1)
            if count > 0 and not self._extend_blocks(sequence, sequence.num_tokens + count):
                held = len(sequence.block_ids) * self.pool.block_size
                count = min(count, held - sequence.num_tokens)
            if count > 0:
                step.tokens_left -= count
                step.drafts[sequence.request_id] = draft[:count]

    def _chunk(self, sequence: TokenSequence, step: _Step) -> Chunk:
        start = sequence.num_computed
        committed_end = start + step.num_scheduled[sequence.request_id]
        draft = step.drafts.get(sequence.request_id, ())
        num_rows = committed_end - start + len(draft)
        samples = committed_end == sequence.num_tokens
        first_logit = num_rows - len(draft) - 1 if samples else num_rows
        if sequence.needs_prompt_scores:
            first_unscored = max(sequence.num_scored, start)
            if first_unscored < min(committed_end, sequence.num_prompt):
                first_logit = min(first_logit, first_unscored - start)
        end_block = self.pool.blocks_for(committed_end + len(draft))
        return Chunk(
            request_id=sequence.request_id,
            start=start,
            token_ids=np.asarray([*sequence.token_ids[start:committed_end], *draft], np.int32),
            block_ids=tuple(sequence.block_ids[:end_block]),
            num_draft=len(draft),
            first_logit=first_logit,
        )

    def _match_prefix(self, sequence: TokenSequence) -> None:
        if (
            sequence.params.prompt_logprobs is not None
            and sequence.num_scored < sequence.num_prompt
        ):
            return
        # The last token is always computed: its logits are needed.
        num_reusable = sequence.num_tokens - 1
        self._extend_hashes(sequence, num_reusable)
        num_blocks = num_reusable // self.pool.block_size
        sequence.block_ids = self.pool.match_prefix(sequence.block_hashes[:num_blocks])
        sequence.num_published = len(sequence.block_ids)
        sequence.num_computed = len(sequence.block_ids) * self.pool.block_size

    def _note_admission(self, sequence: TokenSequence) -> None:
        if sequence.first_scheduled_time is None:
            sequence.first_scheduled_time = self._clock()
            sequence.num_cached = sequence.num_computed
            self.counters.prefix_queries += sequence.num_prompt
            self.counters.prefix_hits += sequence.num_cached

    def _publish(self, sequence: TokenSequence) -> None:
        num_full = sequence.num_computed // self.pool.block_size
        if num_full > sequence.num_published:
            self._extend_hashes(sequence, sequence.num_computed)
            for index in range(sequence.num_published, num_full):
                self.pool.publish(sequence.block_ids[index], sequence.block_hashes[index])
            sequence.num_published = num_full

    def _extend_hashes(self, sequence: TokenSequence, num_tokens: int) -> None:
        extend_block_hashes(
            sequence.block_hashes,
            sequence.token_ids,
            self.pool.block_size,
            num_tokens,
            sequence.request.cache_scope,
        )

    def _extend_blocks(self, sequence: TokenSequence, num_tokens: int) -> bool:
        missing = self.pool.blocks_for(num_tokens) - len(sequence.block_ids)
        if missing <= 0:
            return True
        blocks = self.pool.allocate(missing)
        if blocks is None:
            return False
        sequence.block_ids.extend(blocks)
        return True

    def _next_to_preempt(self) -> TokenSequence:
        """Preemption order: the running sequence that is least urgent, of several the youngest."""
        return max(reversed(self._running), key=lambda sequence: sequence.request.priority)

    def _preempt(self, sequence: TokenSequence, step: _Step) -> None:
        self._running.remove(sequence)
        self._free_blocks(sequence)
        sequence.status = SequenceStatus.WAITING
        self._waiting.put_back(sequence)
        self.counters.preemptions += 1
        step.unschedule(sequence)
        step.preempted = True

    def _free_blocks(self, sequence: TokenSequence) -> None:
        self.pool.release(sequence.block_ids)
        sequence.block_ids = []
        sequence.num_computed = 0
        sequence.num_published = 0
