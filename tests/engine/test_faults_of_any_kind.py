"""Whatever is raised, wherever: the request at fault ends in an error, or the engine restarts or
says that it is dead. Nothing hangs."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.config import RecoveryConfig
from engine.core import EngineCore
from engine.draft.policy import FixedPolicy
from engine.plan import StepPlan
from engine.request import (
    EngineDeadError,
    FinishReason,
    GenerationRequest,
    RequestOutput,
    SpeculationParams,
)
from engine.serving.async_engine import NOT_DELIVERED, AsyncEngine, EngineState
from engine.serving.engine_thread import DEAD, NOT_ADDED, RESTARTING
from engine.serving.isolation import STEP_FAILED
from engine.serving.recovery import EngineBrokenError
from engine.serving.request_workers import RequestWorkers, WorkerError
from engine.serving.watchdog import Watchdog
from tests.engine.helpers import make_core, make_request, run_all, submit, tokens_of
from tests.engine.mock_model import MockRunner
from tests.engine.test_core import OracleDrafter, ngram, plain_answers, requests_of, tokenizer
from tests.engine.test_isolation import check_untouched
from tests.engine.test_recovery import answer, read, request, until


class Panic(BaseException):
    """As pyo3's PanicException: no subclass of Exception."""


KINDS = [Panic, KeyboardInterrupt, SystemExit, MemoryError]
any_kind = pytest.mark.parametrize("kind", KINDS)


def raising(kind: type[BaseException]) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise kind("gone")

    return fail


class PanickyRunner(MockRunner):
    """Raises in every pass that has a slice of a request whose name begins with "bad"."""

    def __init__(self, kind: type[BaseException]) -> None:
        super().__init__(128)
        self.kind = kind
        self.is_broken = False

    def execute(self, plan: StepPlan) -> torch.Tensor:
        if self.is_broken or any(chunk.request_id.startswith("bad") for chunk in plan.chunks):
            raise self.kind("gone")
        return super().execute(plan)


@any_kind
def test_in_a_step_of_one_request(kind: type[BaseException]) -> None:
    core = make_core(PanickyRunner(kind), tokenizer=tokenizer())
    requests = requests_of("sampled")
    outputs = run_all(core, [*requests, make_request([5, 6], "bad")])
    assert outputs.pop("bad")[-1].error == STEP_FAILED
    check_untouched(outputs, requests)


@any_kind
def test_in_the_verification_of_one_request(kind: type[BaseException]) -> None:
    core = make_core(MockRunner(128), tokenizer=tokenizer())
    sample = core._verifier._sample

    def failing(layout: Any, *others: Any) -> Any:
        if any(rows.sequence.request_id == "bad" for rows in layout):
            raise kind("gone")
        return sample(layout, *others)

    core._verifier._sample = failing  # type: ignore[method-assign, assignment]
    requests = requests_of("repetition")
    outputs = run_all(core, [*requests, make_request([5, 6], "bad")])
    assert outputs.pop("bad")[-1].error == STEP_FAILED
    check_untouched(outputs, requests)


@any_kind
def test_in_the_commit_of_one_request(kind: type[BaseException]) -> None:
    core = make_core(MockRunner(128), tokenizer=tokenizer())
    requests = requests_of("greedy")
    core.add(make_request([5, 6], "bad"))
    core.requests["bad"].text.push = raising(kind)  # type: ignore[method-assign]
    outputs: list[RequestOutput] = []
    for item in requests:
        core.add(item)
    while core.has_work:
        outputs += core.step()
    by_name = {
        name: [o for o in outputs if o.request_id == name] for name in plain_answers(requests)
    }
    check_untouched(by_name, requests)
    assert [o.error for o in outputs if o.request_id == "bad"] == [STEP_FAILED]


@any_kind
@pytest.mark.parametrize("where", ["propose", "prepare", "forget", "preprocess"])
def test_in_a_drafter(kind: type[BaseException], where: str) -> None:
    requests = requests_of("sampled")
    truth = {name: tokens_of(outputs) for name, outputs in plain_answers(requests).items()}
    drafter = OracleDrafter(truth, 5)
    setattr(drafter, where, raising(kind))
    core = make_core(MockRunner(128), drafters=[drafter], tokenizer=tokenizer())
    check_untouched(run_all(core, requests), requests)
    figures = core.metrics.drafters["oracle"]
    assert (figures.failures > 0) == (where != "preprocess")
    if where == "preprocess":
        assert figures.drafts == 0, "what could not be prepared is not drafted for"


@any_kind
def test_in_the_policy(kind: type[BaseException]) -> None:
    policy = FixedPolicy(5)
    for method in ("choose", "record", "forget", "observe_step"):
        setattr(policy, method, raising(kind))
    core = make_core(MockRunner(128), drafters=[ngram()], policy=policy, tokenizer=tokenizer())
    requests = requests_of("sampled")
    check_untouched(run_all(core, requests), requests)
    assert core.speculator.state()["failing"]["policy"]["error"] == kind.__name__


@any_kind
def test_in_the_trial_pass_of_an_engine_that_may_be_broken(kind: type[BaseException]) -> None:
    runner = PanickyRunner(kind)
    core = make_core(runner)
    core.add(make_request([1, 2], "a"))
    runner.is_broken = True
    with pytest.raises(EngineBrokenError, match=f"{kind.__name__}: gone"):
        core.step()


@asynccontextmanager
async def started(
    make_core: Callable[[], EngineCore], **recovery: float
) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(lambda: make_core, max_requests=100, recovery=RecoveryConfig(**recovery))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def healthy_core() -> EngineCore:
    return make_core(MockRunner(128), max_running=2)


def core_of(engine: AsyncEngine) -> EngineCore:
    core = engine._thread.core
    assert core is not None
    return core


@any_kind
async def test_in_the_load(kind: type[BaseException]) -> None:
    engine = AsyncEngine(raising(kind), max_requests=1)
    with pytest.raises(kind):
        await engine.start()
    assert engine.state is EngineState.DEAD


@any_kind
async def test_in_a_requests_addition(
    kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with started(healthy_core) as engine:
        core = core_of(engine)
        monkeypatch.setattr(core.scheduler, "add", raising(kind))
        assert (await read(await submit(engine, request(1))))[-1].error == NOT_ADDED
        monkeypatch.undo()
        assert tokens_of(await read(await submit(engine, request(2)))) == answer(2)
        assert engine.state is EngineState.READY
        assert engine.metrics().restarts == 0


@any_kind
async def test_in_the_bookkeeping_of_a_step(kind: type[BaseException]) -> None:
    """Nobody can tell whose fault it is: what runs is lost, and the engine starts again."""
    async with started(healthy_core) as engine:
        stream = await submit(engine, request(0, max_tokens=400))
        await anext(stream)
        core_of(engine).scheduler.schedule = raising(kind)  # type: ignore[method-assign]
        assert (await read(stream))[-1].error == RESTARTING
        await until(lambda: engine.state is EngineState.READY)
        assert engine.metrics().restarts == 1
        assert tokens_of(await read(await submit(engine, request(1)))) == answer(1)


@any_kind
async def test_in_every_restart(kind: type[BaseException]) -> None:
    cores = [healthy_core()]

    def make() -> EngineCore:
        if cores:
            return cores.pop()
        raise kind("gone")

    async with started(make, max_restarts=2) as engine:
        streams = [await submit(engine, request(i, max_tokens=400)) for i in range(4)]
        await anext(streams[0])
        core_of(engine).scheduler.schedule = raising(kind)  # type: ignore[method-assign]
        ends = [(await read(stream))[-1] for stream in streams]
        assert {end.finish_reason for end in ends} == {FinishReason.ERROR}
        assert {end.error for end in ends} == {RESTARTING, DEAD}
        assert engine.state is EngineState.DEAD
        assert engine.failure == f"{kind.__name__}: gone"


@any_kind
@pytest.mark.parametrize("where", ["the outputs' callback", "the watchdog's start", "a restart"])
async def test_in_the_engines_thread_itself(
    kind: type[BaseException], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "the watchdog's start":
        monkeypatch.setattr(Watchdog, "watching", raising(kind))
    async with started(healthy_core) as engine:
        streams = []
        if where == "the watchdog's start":
            await until(lambda: engine.state is EngineState.DEAD)
        else:
            streams = [await submit(engine, request(i, max_tokens=400)) for i in range(3)]
            await anext(streams[0])
        if where == "the outputs' callback":
            failing = replace(engine._thread._callbacks, outputs=raising(kind))
            monkeypatch.setattr(engine._thread, "_callbacks", failing)
        elif where == "a restart":
            core = core_of(engine)
            monkeypatch.setattr(core.requests, "give_up_running", raising(kind))
            core.scheduler.schedule = raising(kind)  # type: ignore[method-assign]
        for stream in streams:
            assert (await read(stream))[-1].error in (DEAD, RESTARTING)
        await until(lambda: engine.state is EngineState.DEAD)
        assert engine.failure == f"{kind.__name__}: gone"
        with pytest.raises(EngineDeadError, match="The engine is dead"):
            await submit(engine, request(7))


@any_kind
async def test_in_the_event_loops_callback(
    kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One output that can't be delivered costs its own stream; those behind it come through."""
    async with started(healthy_core) as engine:
        put = engine._put

        def failing(stream: Any, output: RequestOutput) -> None:
            if output.request_id == "r1":
                raise kind("gone")
            put(stream, output)

        monkeypatch.setattr(engine, "_put", failing)
        streams = [await submit(engine, request(i)) for i in (1, 2)]
        assert (await read(streams[0]))[-1].error == NOT_DELIVERED
        assert tokens_of(await read(streams[1])) == answer(2)
        await until(lambda: not core_of(engine).has_work)
        assert engine.num_requests == 0


@any_kind
async def test_in_the_watchdogs_report(
    kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = []

    def report(*arguments: object) -> None:
        reports.append(arguments)
        raise kind("gone")

    monkeypatch.setattr("engine.serving.watchdog._report", report)
    gate = threading.Event()

    class WaitingRunner(MockRunner):
        def execute(self, plan: StepPlan) -> torch.Tensor:
            gate.wait(10)
            return super().execute(plan)

    make = lambda: make_core(WaitingRunner(128))  # noqa: E731
    async with started(make, stall_seconds=0.05) as engine:
        stream = await submit(engine, request(1))
        await until(lambda: len(reports) == 1)
        gate.set()
        assert tokens_of(await read(stream)) == answer(1)
        await until(lambda: len(reports) == 2)
        assert engine.state is EngineState.READY


@any_kind
async def test_in_a_thread_that_prepares_requests(kind: type[BaseException]) -> None:
    """The event loop must see an Exception: it would end the process for a SystemExit."""
    workers = RequestWorkers()
    try:
        with pytest.raises(MemoryError if kind is MemoryError else WorkerError):
            await workers.text(raising(kind))
        assert await workers.text(len, "abc") == 3
    finally:
        workers.stop()


async def test_preparation_that_fails_is_the_requests_own(monkeypatch: pytest.MonkeyPatch) -> None:
    async with started(healthy_core) as engine:
        monkeypatch.setattr(core_of(engine).preparer, "prepare", raising(Panic))
        with pytest.raises(WorkerError, match="Panic"):
            await engine.prepare(request(1))
        monkeypatch.undo()
        assert tokens_of(await read(await submit(engine, request(2)))) == answer(2)


def test_requests_without_speculation_prepare_none() -> None:
    asked: list[GenerationRequest] = []

    class Asked(OracleDrafter):
        def preprocess(self, request: GenerationRequest, prediction_ids: Sequence[int]) -> None:
            asked.append(request)

    core = make_core(MockRunner(), drafters=[Asked({}, 5)])
    for mode in ("off", "auto", "oracle", "other"):
        item = replace(make_request([1, 2]), speculation=SpeculationParams(mode=mode))
        core.preparer.prepare(item, None)
    assert [item.speculation.mode for item in asked] == ["auto", "oracle"]
