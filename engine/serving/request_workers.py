"""RequestWorkers: threads and processes that make requests ready, off the event loop."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from engine.fault import ANY_FAULT
from engine.request import EngineDeadError, GrammarSpec
from engine.sampling.grammar_trials import GrammarTrials

if TYPE_CHECKING:  # they load native code that /health needn't wait for
    from engine.sampling.grammar import Grammars
    from engine.sampling.grammar_compiler import CompiledGrammar

P = ParamSpec("P")
T = TypeVar("T")

NUM_TEXT_THREADS = 8
"""More than there are cores, so that short texts pass long ones."""
NUM_COMPILERS = 2
"""Grammars compiled at once; each takes a process of about 100 MiB while it is there."""


class WorkerError(RuntimeError):
    """Making a request ready failed in a way that is no exception of Python's own kind."""


class RequestWorkers:
    """Separate threads by purpose: slow grammars hold up grammars, and nothing else.

    Whatever a thread raises becomes an `Exception` of the one who waits.
    """

    def __init__(self) -> None:
        self._text = ThreadPoolExecutor(NUM_TEXT_THREADS, "slipstream-text")
        self._compiling = ThreadPoolExecutor(NUM_COMPILERS, "slipstream-grammar")
        self._trials = GrammarTrials()
        self._stopped = False

    def warm_up(self, grammars: Grammars) -> None:
        """Have a process for grammars started, which takes a second, without waiting for it."""
        if grammars.are_possible and not self._stopped:
            self._compiling.submit(self._trials.warm_up, grammars.token_table)

    def stop(self) -> None:
        """End the processes; work in progress ends in an error, or for nobody. Idempotent."""
        self._stopped = True
        self._trials.close()
        for pool in (self._text, self._compiling):
            pool.shutdown(wait=False, cancel_futures=True)

    async def text(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run work on texts and tokens, which ends in time proportional to their size."""
        return await self._run(self._text, functools.partial(work, *args, **kwargs))

    async def compile(
        self, grammars: Grammars, spec: GrammarSpec, time_limit: float
    ) -> CompiledGrammar:
        """A compiled grammar: at once, if it is known, else when it has passed its trial.

        Args:
            time_limit: seconds for the trial, which begins when a process is free for it.

        Raises:
            RequestError: it can't be used, or takes too long.
        """
        known = grammars.known(spec)
        if known is not None:
            return known
        work = functools.partial(self._compile, grammars, spec, time_limit)
        return await self._run(self._compiling, work)

    async def _run(self, pool: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        if self._stopped:
            raise EngineDeadError("The engine is stopped.")
        return await asyncio.get_running_loop().run_in_executor(pool, _guarded, work)

    def _compile(self, grammars: Grammars, spec: GrammarSpec, time_limit: float) -> CompiledGrammar:
        try:
            # It may have become known while this waited for its turn.
            if grammars.known(spec) is None:
                self._trials.check(spec, grammars.token_table, time_limit)
            return grammars.compile(spec)
        finally:
            if self._trials.needs_process:
                self.warm_up(grammars)


def _guarded(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except Exception:
        raise
    except ANY_FAULT as error:
        # An event loop would take a SystemExit for its own, and routes handle no panics.
        raise WorkerError(f"{type(error).__name__} while a request was made ready") from error
