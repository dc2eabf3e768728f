"""An engine that breaks, stalls or has a reader that doesn't read."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import torch

from engine.config import RecoveryConfig
from engine.core import EngineCore
from engine.draft.ngram import NgramDrafter
from engine.plan import StepPlan
from engine.preparation import Preparation
from engine.request import EngineDeadError, FinishReason, GenerationRequest, RequestOutput
from engine.scheduling.sequence import TokenSequence
from engine.serving.async_engine import AsyncEngine, EngineState, OutputStream
from engine.serving.engine_thread import DEAD, RESTARTING
from engine.serving.recovery import RestartBudget
from engine.serving.watchdog import Watchdog
from tests.engine.helpers import make_core, make_request, run_all, submit, tokens_of
from tests.engine.mock_model import MockRunner


class Device:
    """What all runners of a test run on."""

    def __init__(self) -> None:
        self.is_broken = False
        self.gate = threading.Event()
        self.gate.set()


class DeviceRunner(MockRunner):
    def __init__(self, device: Device) -> None:
        super().__init__(128)
        self._device = device

    def execute(self, plan: StepPlan) -> torch.Tensor:
        self._device.gate.wait(10)
        if self._device.is_broken:
            raise RuntimeError("the device is gone")
        return super().execute(plan)


class Cores:
    """Makes cores; `repairs` tells which of them finds the device repaired."""

    def __init__(self, device: Device, repairs: Callable[[int], bool]) -> None:
        self.device = device
        self.num_made = 0
        self._repairs = repairs

    def __call__(self) -> EngineCore:
        self.num_made += 1
        if self.device.is_broken and self._repairs(self.num_made):
            self.device.is_broken = False
        core = make_core(
            DeviceRunner(self.device),
            drafters=[NgramDrafter(min_match=1, max_match=3)],
            max_running=2,
        )
        core.warm_up()
        return core


@asynccontextmanager
async def started(cores: Callable[[], EngineCore], **recovery: float) -> AsyncIterator[AsyncEngine]:
    config = RecoveryConfig(**recovery)
    engine = AsyncEngine(lambda: cores, max_requests=1000, recovery=config)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def request(index: int, max_tokens: int = 30) -> GenerationRequest:
    return make_request(
        [1, 2, index], f"r{index}", seed=index, temperature=1.0, max_tokens=max_tokens
    )


def answer(index: int) -> list[int]:
    core = make_core(MockRunner())
    return tokens_of(run_all(core, [request(index)]).popitem()[1])


async def read(stream: OutputStream) -> list[RequestOutput]:
    async with asyncio.timeout(20):
        return [output async for output in stream]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def test_broken_engine_starts_again_and_keeps_what_waits() -> None:
    device = Device()
    cores = Cores(device, repairs=lambda number: number == 2)
    async with started(cores) as engine:
        device.gate.clear()
        streams = [await submit(engine, request(i)) for i in range(6)]
        await until(lambda: engine.num_requests == 6)
        device.is_broken = True
        device.gate.set()
        results = [await read(stream) for stream in streams]
        failed = [r for r in results if r[-1].finish_reason is FinishReason.ERROR]
        served = [i for i, r in enumerate(results) if r[-1].finish_reason is FinishReason.LENGTH]
        assert 1 <= len(failed) <= 2, "those that ran"
        assert len(served) == 6 - len(failed)
        for index in served:
            assert tokens_of(results[index]) == answer(index)
        assert engine.state is EngineState.READY
        assert engine.failure is None
        metrics = engine.metrics()
        assert metrics.restarts == 1
        assert metrics.finished[FinishReason.ERROR] == len(failed)
        assert metrics.finished[FinishReason.LENGTH] == len(served)
        assert engine.num_requests == 0
        core = engine._thread.core
        assert core is not None
        core.check_integrity()
        assert tokens_of(await read(await submit(engine, request(9)))) == answer(9)


async def test_preempted_request_is_kept_with_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(MockRunner(num_blocks=12), max_running=4)
    requests = [
        make_request([i] * 9, f"r{i}", seed=i, temperature=1.0, max_tokens=20) for i in range(4)
    ]
    expected = {
        name: tokens_of(outputs)
        for name, outputs in run_all(make_core(MockRunner()), requests).items()
    }
    outputs: dict[str, list[RequestOutput]] = {r.request_id: [] for r in requests}
    for item in requests:
        core.add(item)

    def step(core: EngineCore) -> None:
        for output in core.step():
            outputs[output.request_id].append(output)

    while not any(s.num_output for s in core.scheduler.waiting):
        step(core)
    kept = core.requests.waiting_ids
    fresh = make_core(MockRunner(num_blocks=12), max_running=4)
    fresh.resume_from(core)
    assert fresh.requests.waiting_ids == kept
    while fresh.has_work:
        step(fresh)
        fresh.check_integrity()
    for name in kept:
        assert tokens_of(outputs[name]) == expected[name]
    assert fresh.metrics.preemptions > 0


@pytest.mark.parametrize("fails_in", ["requeue", "update gauges"])
async def test_restart_that_fails_half_way_counts_nothing(fails_in: str) -> None:
    """The first new core breaks while it resumes; the second one counts, once."""
    device = Device()
    make = Cores(device, repairs=lambda _: True)

    def cores() -> EngineCore:
        core = make()
        if make.num_made == 2:

            def fail(*_: object) -> None:
                raise KeyError("bookkeeping")

            if fails_in == "requeue":
                requeue, requeued = core.scheduler.requeue, []

                def requeue_one(sequence: TokenSequence) -> None:
                    requeued.append(sequence)
                    requeue(sequence) if len(requeued) == 1 else fail()

                core.scheduler.requeue = requeue_one  # type: ignore[method-assign]
            else:
                core.accounting.update_gauges = fail  # type: ignore[method-assign, assignment]
        return core

    async with started(cores) as engine:
        streams = [await submit(engine, request(i, max_tokens=150)) for i in range(6)]
        core = engine._thread.core
        assert core is not None
        await until(lambda: core.scheduler.num_waiting == 4)
        device.is_broken = True
        ends = [(await read(stream))[-1].finish_reason for stream in streams]
        num_failed = ends.count(FinishReason.ERROR)
        assert num_failed == 2, "those that ran"
        assert make.num_made == 3
        finished = engine.metrics().finished
        assert finished[FinishReason.ERROR] == num_failed
        assert finished[FinishReason.LENGTH] == 6 - num_failed
        assert engine.metrics().restarts == 1


@pytest.mark.parametrize("max_restarts", [0, 2])
async def test_engine_that_stays_broken_dies(max_restarts: int) -> None:
    device = Device()
    cores = Cores(device, repairs=lambda _: False)
    async with started(cores, max_restarts=max_restarts) as engine:
        device.gate.clear()
        streams = [await submit(engine, request(i)) for i in range(5)]
        device.is_broken = True
        device.gate.set()
        results = [await read(stream) for stream in streams]
        assert {r[-1].finish_reason for r in results} == {FinishReason.ERROR}
        assert results[4][-1].error == DEAD
        assert cores.num_made == 1 + max_restarts
        assert engine.state is EngineState.DEAD
        assert engine.failure == "RuntimeError: the device is gone"
        with pytest.raises(EngineDeadError, match="the device is gone"):
            await submit(engine, request(7))
        assert engine.num_requests == 0


async def test_requests_are_refused_while_the_engine_starts_again() -> None:
    device, resume = Device(), threading.Event()
    make = Cores(device, repairs=lambda number: number == 2)

    def cores() -> EngineCore:
        if make.num_made == 1:
            resume.wait(10)
        return make()

    async with started(cores) as engine:
        device.gate.clear()
        stream = await submit(engine, request(0))
        device.is_broken = True
        device.gate.set()
        await until(lambda: engine.state is EngineState.RESTARTING)
        assert engine.failure == "RuntimeError: the device is gone"
        with pytest.raises(EngineDeadError, match="restarting"):
            await submit(engine, request(1))
        assert (await read(stream))[-1].finish_reason is FinishReason.ERROR
        resume.set()
        await until(lambda: engine.state is EngineState.READY)
        assert tokens_of(await read(await submit(engine, request(1)))) == answer(1)


async def test_scheduler_fault_ends_what_runs_and_no_more() -> None:
    """A fault outside the forward pass can't be told apart."""
    cores = Cores(Device(), repairs=lambda _: True)
    async with started(cores) as engine:
        core = engine._thread.core
        assert core is not None

        def fail(_: object) -> None:
            raise KeyError("bookkeeping")

        core.scheduler.schedule = fail  # type: ignore[method-assign, assignment]
        lost = await read(await submit(engine, request(0)))
        kept = [o for o in lost if o.finish_reason is FinishReason.LENGTH]
        assert kept, "it had not left the queue"
        assert tokens_of(lost) == answer(0)
        assert engine.metrics().restarts == 1


async def test_running_requests_are_told_to_try_again() -> None:
    cores = Cores(Device(), repairs=lambda _: True)
    async with started(cores) as engine:
        stream = await submit(engine, request(0, max_tokens=200))
        await anext(stream)
        core = engine._thread.core
        assert core is not None

        def fail(_: object) -> None:
            raise KeyError("bookkeeping")

        core.scheduler.schedule = fail  # type: ignore[method-assign, assignment]
        outputs = await read(stream)
        assert outputs[-1].error == RESTARTING


async def test_request_that_cannot_be_queued_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with started(Cores(Device(), repairs=lambda _: True)) as engine:
        core = engine._thread.core
        assert core is not None
        add = core.add

        def picky(item: GenerationRequest, preparation: Preparation) -> None:
            if item.request_id == "r3":
                raise TypeError("what is this?")
            add(item, preparation)

        monkeypatch.setattr(core, "add", picky)
        results = [await read(await submit(engine, request(i))) for i in (2, 3, 4)]
        assert results[1][-1].finish_reason is FinishReason.ERROR
        assert [tokens_of(results[0]), tokens_of(results[2])] == [answer(2), answer(4)]
        assert engine.metrics().restarts == 0


async def test_stalled_step_shows_and_passes(caplog: pytest.LogCaptureFixture) -> None:
    device = Device()
    async with started(Cores(device, repairs=lambda _: True), stall_seconds=0.1) as engine:
        device.gate.clear()
        stream = await submit(engine, request(0))
        await until(lambda: engine.state is EngineState.STALLED)
        assert engine.failure == "a step has taken 0 s"
        second = await submit(engine, request(1))
        await until(lambda: any("goes on" in r.getMessage() for r in caplog.records))
        device.gate.set()
        assert tokens_of(await read(stream)) == answer(0)
        assert tokens_of(await read(second)) == answer(1)
        assert engine.state is EngineState.READY
        await until(lambda: any("has ended" in r.getMessage() for r in caplog.records))
    messages = [r.getMessage() for r in caplog.records]
    (told,) = [m for m in messages if "goes on" in m]
    assert "self._device.gate.wait(10)" in told, "the stack tells where"


async def test_stop_does_not_wait_for_a_step_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.serving.async_engine._STOP_SECONDS", 0.1)
    device = Device()
    async with started(Cores(device, repairs=lambda _: True), stall_seconds=0.05) as engine:
        device.gate.clear()
        stream = await submit(engine, request(0))
        await until(lambda: engine.state is EngineState.STALLED)
        async with asyncio.timeout(2):
            await engine.stop()
        assert (await read(stream))[-1].finish_reason is FinishReason.ERROR
        assert not engine.state.has_ended
        device.gate.set()


async def test_reader_that_does_not_read_is_cut_off_and_the_others_are_not() -> None:
    cores = Cores(Device(), repairs=lambda _: True)
    async with started(cores, max_unread_outputs=8) as engine:
        slow = await submit(engine, request(0, max_tokens=300))
        assert tokens_of(await read(await submit(engine, request(1)))) == answer(1)
        await until(lambda: engine.num_requests == 0)
        assert slow.num_unread == 9
        outputs = await read(slow)
        assert outputs[-1].finish_reason is FinishReason.ERROR
        assert "does not read" in str(outputs[-1].error)
        core = engine._thread.core
        assert core is not None
        await until(lambda: not core.has_work)
        assert core.scheduler.pool.usage == 0


def test_restarts_are_counted_in_a_window() -> None:
    now = 0.0
    budget = RestartBudget(2, 10.0, clock=lambda: now)
    assert [budget.take(), budget.take(), budget.take()] == [True, True, False]
    now = 10.5
    assert [budget.take(), budget.take(), budget.take()] == [True, True, False]


def test_watchdog_measures_the_step_in_progress() -> None:
    now = 5.0
    watchdog = Watchdog(2.0, clock=lambda: now)
    assert watchdog.stalled_for is None
    with watchdog.step():
        now = 6.9
        assert watchdog.stalled_for is None
        now = 9.0
        assert watchdog.stalled_for == 4.0
    assert watchdog.stalled_for is None
