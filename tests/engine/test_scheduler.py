from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.plan import StepPlan, roll_back
from engine.scheduling.blocks import BlockPool
from engine.scheduling.scheduler import Scheduler
from tests.engine.helpers import make_request

BLOCK_SIZE = 4


def make_scheduler(num_blocks: int = 32, **limits: int) -> Scheduler:
    ticks = itertools.count()
    options = {"max_running": 4, "max_step_tokens": 24, "prefill_chunk": 8} | limits
    return Scheduler(BlockPool(num_blocks, BLOCK_SIZE), clock=lambda: float(next(ticks)), **options)


def commit_all(scheduler: Scheduler, plan: StepPlan, token: int = 7) -> None:
    for chunk in plan.chunks:
        sequence = scheduler[chunk.request_id]
        samples = chunk.end - chunk.num_draft == sequence.num_tokens
        scheduler.commit(roll_back(chunk, 0), (token,) if samples else ())


def test_long_prompt_is_computed_in_chunks_and_samples_only_at_its_end() -> None:
    scheduler = make_scheduler()
    sequence = scheduler.add(make_request(range(20)))
    seen = []
    for _ in range(3):
        plan = scheduler.schedule({})
        (chunk,) = plan.chunks
        seen.append((chunk.start, chunk.num_tokens, chunk.num_logits))
        commit_all(scheduler, plan)
    assert seen == [(0, 8, 0), (8, 8, 0), (16, 4, 1)]
    assert sequence.is_decoding
    assert sequence.num_output == 1


def test_decoding_goes_on_beside_a_prefill() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request([1, 2], "short"))
    commit_all(scheduler, scheduler.schedule({}))
    scheduler.add(make_request(range(30), "long"))
    plan = scheduler.schedule({"short": (3, 4)})
    assert [(p.request_id, p.num_tokens, p.num_draft) for p in plan.chunks] == [
        ("short", 3, 2),
        ("long", 8, 0),
    ]


def test_drafts_are_cut_to_the_budget_and_to_max_tokens() -> None:
    scheduler = make_scheduler(max_step_tokens=12)
    for name, max_tokens in (("a", 20), ("b", 3)):
        scheduler.add(make_request([1], name, max_tokens=max_tokens))
    commit_all(scheduler, scheduler.schedule({}))
    plan = scheduler.schedule({"a": tuple(range(50, 62)), "b": (1, 2, 3, 4)})
    drafts = {p.request_id: p.token_ids[1:].tolist() for p in plan.chunks}
    # a: 12 tokens less one each for a and b; b: nothing left, though one of its own fits.
    assert drafts == {"a": list(range(50, 60)), "b": []}
    plan = scheduler.schedule({"b": (1, 2, 3, 4)})
    drafts = {p.request_id: p.token_ids[1:].tolist() for p in plan.chunks}
    assert drafts == {"a": [], "b": [1]}


def test_youngest_is_preempted_and_draft_never_preempts() -> None:
    scheduler = make_scheduler(num_blocks=4)
    scheduler.add(make_request([1] * 7, "old"))
    scheduler.add(make_request([2] * 7, "young"))
    for _ in range(3):
        commit_all(scheduler, scheduler.schedule({}))
    plan = scheduler.schedule({"old": (1,) * 8})
    assert scheduler.counters.preemptions == 1
    assert [p.request_id for p in plan.chunks] == ["old"]
    scheduler.check_integrity()
    scheduler.finish("old")
    (chunk,) = scheduler.schedule({}).chunks
    assert (chunk.request_id, chunk.start) == ("young", 4)


def test_least_urgent_is_preempted_even_if_it_is_older() -> None:
    scheduler = make_scheduler(num_blocks=4)
    scheduler.add(replace(make_request([1] * 7, "patient"), priority=1))
    scheduler.add(make_request([2] * 7, "urgent"))
    for _ in range(4):
        commit_all(scheduler, scheduler.schedule({}))
    assert scheduler.counters.preemptions == 1
    assert [s.request_id for s in scheduler.running] == ["urgent"]
    assert scheduler["urgent"].num_output >= 2
    scheduler.check_integrity()


def test_urgent_requests_are_admitted_first_and_overdue_ones_are_told() -> None:
    scheduler = make_scheduler(max_running=1)
    scheduler.add(make_request([1], "first"))
    commit_all(scheduler, scheduler.schedule({}))
    scheduler.add(replace(make_request([2], "late"), queue_timeout=5.0))
    scheduler.add(replace(make_request([3], "urgent"), priority=-1))
    scheduler.finish("first")
    (chunk,) = scheduler.schedule({}).chunks
    assert chunk.request_id == "urgent"
    assert scheduler.overdue(4.0) == []
    assert scheduler.overdue(60.0) == ["late"]
    scheduler.finish("late")
    scheduler.check_integrity()


def test_equal_prompt_reuses_all_blocks_but_the_last_token() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(range(8), "first"))
    commit_all(scheduler, scheduler.schedule({}))
    second = scheduler.add(make_request(range(8), "second"))
    plan = scheduler.schedule({})
    assert [(p.request_id, p.start, p.num_tokens) for p in plan.chunks] == [
        ("first", 8, 1),
        ("second", 4, 4),
    ]
    assert second.num_cached == 4
    assert (scheduler.counters.prefix_queries, scheduler.counters.prefix_hits) == (16, 4)


def test_cached_prefixes_are_shared_within_a_scope_only() -> None:
    scheduler = make_scheduler()
    cached = {}
    for name, scope in (("a", "ann"), ("b", "ben"), ("c", "ann"), ("d", "")):
        sequence = scheduler.add(replace(make_request(range(8), name), cache_scope=scope))
        commit_all(scheduler, scheduler.schedule({}))
        cached[name] = sequence.num_cached
    assert cached == {"a": 0, "b": 0, "c": 4, "d": 0}


def test_prompt_logprobs_want_every_row_and_take_no_cache_hit() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(range(8), "first"))
    commit_all(scheduler, scheduler.schedule({}))
    scheduler.add(make_request(range(8), "scored", prompt_logprobs=0))
    chunk = scheduler.schedule({}).chunks[1]
    assert (chunk.start, chunk.first_logit, chunk.num_logits) == (0, 0, 8)


class SchedulerMachine(RuleBasedStateMachine):
    """Random arrivals, drafts, acceptances and aborts on a pool that is too small."""

    def __init__(self) -> None:
        super().__init__()
        self.names = itertools.count()
        self.wanted: dict[str, int] = {}
        self.age: dict[str, int] = {}
        self.steps_since_progress: dict[str, int] = {}

    @initialize(num_blocks=st.integers(6, 16), prefill_chunk=st.integers(1, 9))
    def start(self, num_blocks: int, prefill_chunk: int) -> None:
        self.max_step_tokens = 3 + prefill_chunk + 4
        self.capacity = num_blocks * BLOCK_SIZE
        self.scheduler = make_scheduler(
            num_blocks,
            max_running=3,
            max_step_tokens=self.max_step_tokens,
            prefill_chunk=prefill_chunk,
        )

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=16),
        max_tokens=st.integers(1, 8),
        scored=st.booleans(),
        client=st.sampled_from(("ann", "ben")),
        priority=st.integers(-1, 1),
    )
    def arrive(
        self, prompt: list[int], max_tokens: int, scored: bool, client: str, priority: int
    ) -> None:
        name = f"r{next(self.names)}"
        request = make_request(
            prompt, name, max_tokens=max_tokens, prompt_logprobs=0 if scored else None
        )
        self.scheduler.add(replace(request, client=client, priority=priority))
        self.wanted[name] = max_tokens

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.wanted)))
        self.scheduler.finish(name)
        del self.wanted[name]

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        decoding = [s for s in self.scheduler.running if s.is_decoding]
        drafts = {
            s.request_id: tuple(data.draw(st.lists(st.integers(0, 2), max_size=6)))
            for s in decoding
        }
        self._step(drafts, lambda limit: data.draw(st.integers(0, limit)))

    def _step(self, drafts, accept) -> None:
        plan = self.scheduler.schedule(drafts)
        assert plan.num_tokens <= self.max_step_tokens
        written = [
            block * BLOCK_SIZE + offset
            for chunk in plan.chunks
            for position in range(chunk.start, chunk.end)
            for block, offset in [(chunk.block_ids[position // BLOCK_SIZE], position % BLOCK_SIZE)]
        ]
        assert len(written) == len(set(written))
        for chunk in plan.chunks:
            sequence = self.scheduler[chunk.request_id]
            assert chunk.start == sequence.num_computed
            committed = chunk.num_tokens - chunk.num_draft
            expected = sequence.token_ids[chunk.start : chunk.start + committed]
            assert chunk.token_ids[:committed].tolist() == expected
            samples = chunk.start + committed == sequence.num_tokens
            if not samples:
                self.scheduler.commit(chunk, ())
                continue
            accepted = accept(chunk.num_draft)
            tokens = (*chunk.token_ids[committed : committed + accepted].tolist(), 1)
            self.scheduler.commit(roll_back(chunk, accepted), tokens)
            assert sequence.is_decoding
            assert sequence.num_output <= self.wanted[chunk.request_id]
            if sequence.num_output == self.wanted[chunk.request_id]:
                self.scheduler.finish(chunk.request_id)
                del self.wanted[chunk.request_id]

    @invariant()
    def blocks_add_up(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        # No starvation: without new arrivals everyone finishes in bounded time.
        bound = 60 * (len(self.wanted) + 1)
        for _ in range(bound):
            if not self.scheduler.has_work:
                break
            self._step({}, lambda limit: 0)
        assert not self.wanted
        assert self.scheduler.pool.num_free == self.scheduler.pool.num_blocks


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_plan_pack_follows_block_tables() -> None:
    from engine.plan import Chunk, pack

    plan = StepPlan(
        (
            Chunk("a", 3, np.array([5, 6, 7], np.int32), (4, 1), num_draft=2, first_logit=0),
            Chunk("b", 0, np.array([9, 9], np.int32), (2,), first_logit=2),
        )
    )
    packed = pack(plan, BLOCK_SIZE)
    assert packed.token_ids.tolist() == [5, 6, 7, 9, 9]
    assert packed.positions.tolist() == [3, 4, 5, 0, 1]
    assert packed.slots.tolist() == [19, 4, 5, 8, 9]
    assert packed.query_starts.tolist() == [0, 3, 5]
    assert packed.context_lens.tolist() == [6, 2]
    assert packed.block_tables.tolist() == [[4, 1], [2, 0]]
    assert packed.logit_rows.tolist() == [0, 1, 2]
