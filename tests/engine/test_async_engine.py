from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from engine.core import EngineCore
from engine.draft.ngram import NgramDrafter
from engine.request import EngineDeadError, FinishReason, QueueFullError, RequestError
from engine.serving.async_engine import AsyncEngine, EngineState
from tests.engine.helpers import make_core, make_request, run_all, submit, tokens_of
from tests.engine.mock_model import MockRunner


def mock_core() -> EngineCore:
    return make_core(MockRunner(128), drafters=[NgramDrafter(min_match=1, max_match=3)])


@asynccontextmanager
async def started(
    make_core: Callable[[], EngineCore] = mock_core, max_requests: int = 1000
) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(lambda: make_core, max_requests=max_requests)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def collect(engine: AsyncEngine, name: str, **params: object) -> list[int]:
    tokens: list[int] = []
    async with await submit(engine, make_request([1, 2, 3], name, **params)) as stream:
        async for output in stream:
            tokens.extend(output.token_ids)
    return tokens


async def idle(engine: AsyncEngine) -> EngineCore:
    """Wait until the engine's thread has worked off every command."""
    core = engine._thread.core
    assert core is not None
    async with asyncio.timeout(10):
        while core.has_work or engine._thread._inbox:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    return core


async def test_streams_the_cores_tokens() -> None:
    expected = tokens_of(run_all(mock_core(), [make_request([1, 2, 3], "a")])["a"])
    async with started() as engine:
        assert await collect(engine, "a") == expected
        assert engine.num_requests == 0


async def test_many_requests_at_once_get_their_own_answers() -> None:
    async with started() as engine:
        alone = [await collect(engine, f"a{i}", seed=i, temperature=1.0) for i in range(10)]
        together = await asyncio.gather(
            *(collect(engine, f"b{i}", seed=i, temperature=1.0) for i in range(10))
        )
    assert together == alone


async def test_200_cancelled_streams_leave_nothing_behind() -> None:
    rng = random.Random(11)
    async with started() as engine:
        expected = await collect(engine, "before")
        tasks_before = asyncio.all_tasks()

        async def walk_away(index: int) -> None:
            await asyncio.sleep(rng.random() * 0.2)
            request = make_request(range(1 + index % 30), f"x{index}", max_tokens=100)
            patience = rng.randrange(12)
            async with await submit(engine, request) as stream:
                async for _ in stream:
                    patience -= 1
                    if patience < 0:
                        return

        walkers = [asyncio.create_task(walk_away(index)) for index in range(200)]
        for walker in rng.sample(walkers, 60):
            await asyncio.sleep(0.002)
            walker.cancel()
        await asyncio.gather(*walkers, return_exceptions=True)
        core = await idle(engine)
        assert core.metrics.finished[FinishReason.ABORT] > 50
        core.check_integrity()
        assert core.scheduler.pool.num_free == core.scheduler.pool.num_blocks
        assert engine.num_requests == 0
        assert asyncio.all_tasks() == tasks_before
        assert await collect(engine, "after") == expected


async def test_blocks_are_free_within_one_step_of_a_disconnect() -> None:
    async with started() as engine:
        async with await submit(engine, make_request([1], "a", max_tokens=200)) as stream:
            await anext(stream)
        core = await idle(engine)
        passes = core.target.num_passes  # type: ignore[attr-defined]
        assert core.scheduler.pool.usage == 0.0
        await asyncio.sleep(0.05)
        assert core.target.num_passes == passes  # type: ignore[attr-defined]


async def test_load_failure_is_raised_and_remembered() -> None:
    def load() -> Callable[[], EngineCore]:
        raise RuntimeError("no such model")

    engine = AsyncEngine(load, max_requests=1)
    with pytest.raises(RuntimeError, match="no such model"):
        await engine.start()
    assert engine.state is EngineState.DEAD
    assert engine.failure == "no such model"
    with pytest.raises(EngineDeadError, match="no such model"):
        await submit(engine, make_request([1]))
    await engine.stop()


async def test_stop_ends_running_streams() -> None:
    engine = AsyncEngine(lambda: mock_core, max_requests=10)
    await engine.start()
    stream = await submit(engine, make_request([1], "a", max_tokens=200))
    await anext(stream)
    await engine.stop()
    outputs = [output async for output in stream]
    assert outputs[-1].finish_reason in (FinishReason.ERROR, FinishReason.LENGTH)
    assert engine.state is EngineState.STOPPED


async def test_refusals() -> None:
    async with started(max_requests=1) as engine:
        with pytest.raises(RequestError):
            await submit(engine, make_request([]))
        async with await submit(engine, make_request([1], "a", max_tokens=100)):
            with pytest.raises(QueueFullError) as refusal:
                await submit(engine, make_request([1], "b"))
            assert refusal.value.expected_wait > 0
        await collect(engine, "c")


async def test_expected_wait_follows_the_queue_and_the_pace() -> None:
    async with started() as engine:
        began = time.monotonic()
        for number in range(20):
            await collect(engine, f"a{number}")
        took = time.monotonic() - began
        quiet = engine.expected_wait
        assert took / 40 < quiet <= took / 20
        engine.metrics().waiting = 9
        assert engine.expected_wait == pytest.approx(10 * quiet)


async def test_whoever_leaves_in_whatever_way_counts_once() -> None:
    async with started() as engine:
        streams = [
            await submit(engine, make_request([1], f"a{n}", max_tokens=200)) for n in range(3)
        ]
        streams[0].close()
        streams[0].close()
        await collect(engine, "b")
    assert engine._pace.num_present == 0
    assert engine._pace.seconds_for(1) > 0


async def test_nothing_can_be_asked_before_the_load() -> None:
    engine = AsyncEngine(lambda: mock_core, max_requests=1)
    assert engine.state is EngineState.LOADING
    with pytest.raises(EngineDeadError, match="loading"):
        await submit(engine, make_request([1]))
