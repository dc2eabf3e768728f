"""EngineThread: loads the models, runs steps, and starts over when the core has broken."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING

from engine.config import RecoveryConfig
from engine.fault import ANY_FAULT
from engine.preparation import Preparation
from engine.request import (
    FinishReason,
    GenerationRequest,
    RequestError,
    RequestOutput,
    Usage,
)
from engine.serving.recovery import EngineBrokenError, RestartBudget
from engine.serving.watchdog import Watchdog

if TYPE_CHECKING:  # torch and transformers take seconds to import; `load` imports them
    from engine.core import EngineCore

logger = logging.getLogger(__name__)

RESTARTING = "The engine failed and starts again; send the request once more."
DEAD = "The engine failed; see the server's log."
NOT_ADDED = "The engine failed to take this request; see the server's log."


class EngineState(StrEnum):
    LOADING = "loading"
    READY = "ready"
    STALLED = "stalled"
    """A step takes too long; requests wait behind it."""
    RESTARTING = "restarting"
    DEAD = "dead"
    STOPPED = "stopped"

    @property
    def takes_requests(self) -> bool:
        return self in (EngineState.READY, EngineState.STALLED)

    @property
    def has_ended(self) -> bool:
        return self in (EngineState.DEAD, EngineState.STOPPED)


@dataclass(frozen=True, slots=True)
class Add:
    """Queue a request."""

    request: GenerationRequest
    preparation: Preparation


@dataclass(frozen=True, slots=True)
class Abort:
    """Drop a request, if it has not ended."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Callbacks:
    """What the thread tells; called in it."""

    loaded: Callable[[BaseException | None], None]
    """None, or why the load failed."""
    outputs: Callable[[Sequence[RequestOutput]], None]
    died: Callable[[str], None]
    """Every request that has not ended is lost, for this reason."""


class EngineThread:
    """Owns the core. Its methods may be called from any thread, and don't wait for it."""

    def __init__(
        self,
        load: Callable[[], Callable[[], EngineCore]],
        recovery: RecoveryConfig,
        callbacks: Callbacks,
    ) -> None:
        """
        Args:
            load: loads the models; the result makes a core of them, as often as one breaks.
        """
        self._load = load
        self._callbacks = callbacks
        self._budget = RestartBudget(recovery.max_restarts, recovery.restart_window_seconds)
        self._watchdog = Watchdog(recovery.stall_seconds)
        self._state = EngineState.LOADING
        self._failure: str | None = None
        self._core: EngineCore | None = None
        self._inbox: deque[Add | Abort] = deque()
        self._taken: set[str] = set()
        """Requests the core was given and whose end has not been told."""
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="slipstream-engine", daemon=True)

    @property
    def core(self) -> EngineCore | None:
        """The core in use, or the last one."""
        return self._core

    @property
    def state(self) -> EngineState:
        if self._state is EngineState.READY and self._watchdog.stalled_for is not None:
            return EngineState.STALLED
        return self._state

    @property
    def failure(self) -> str | None:
        """What is wrong, in one line."""
        stalled = self._watchdog.stalled_for
        if self._failure is None and stalled is not None:
            return f"a step has taken {stalled:.0f} s"
        return self._failure

    def start(self) -> None:
        self._thread.start()

    def post(self, command: Add | Abort) -> None:
        with self._wake:
            self._inbox.append(command)
            self._wake.notify()

    def stop(self, timeout: float) -> bool:
        """Let the step in progress end, and the thread with it; whether it did within `timeout`."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        if self._thread.is_alive():
            logger.error("the engine's step does not end; the engine is left as it is")
            return False
        if self._state is not EngineState.DEAD:
            self._state = EngineState.STOPPED
        return True

    def _run(self) -> None:
        try:
            self._load_and_serve()
        except ANY_FAULT as error:
            # Not of a core, which would be made anew: of this class, or of a callback.
            self._die(error)

    def _load_and_serve(self) -> None:
        try:
            make_core = self._load()
            core: EngineCore | None = make_core()
        except ANY_FAULT as error:
            self._failure = str(error)
            self._state = EngineState.DEAD
            self._callbacks.loaded(error)
            return
        self._core, self._state = core, EngineState.READY
        self._callbacks.loaded(None)
        with self._watchdog.watching():
            while core is not None:
                core = self._serve_until_broken(core, make_core)

    def _die(self, error: BaseException) -> None:
        self._failure, self._state = _line(error), EngineState.DEAD
        logger.critical("the engine's thread failed and has ended", exc_info=error)
        tellings = (partial(self._callbacks.loaded, error), partial(self._callbacks.died, DEAD))
        for tell in tellings:
            try:
                tell()
            except ANY_FAULT:
                logger.exception("nobody can be told that the engine is dead")

    def _serve_until_broken(
        self, core: EngineCore, make_core: Callable[[], EngineCore]
    ) -> EngineCore | None:
        """The core to go on with; None: the engine is stopped or dead."""
        try:
            self._serve(core)
        except ANY_FAULT as error:
            if not self._stopping:
                return self._restart(core, make_core, error)
            logger.exception("the engine failed while it was stopped")
        return None

    def _serve(self, core: EngineCore) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._stopping or self._inbox or core.has_work)
                if self._stopping:
                    return
            with self._watchdog.step():
                while self._inbox:
                    self._apply(core, self._inbox.popleft())
                outputs = core.step()
            self._tell(outputs)

    def _apply(self, core: EngineCore, command: Add | Abort) -> None:
        if isinstance(command, Abort):
            self._taken.discard(command.request_id)
            core.abort(command.request_id)
            return
        request = command.request
        try:
            core.add(request, command.preparation)
        except RequestError as error:
            self._tell([error_output(request.request_id, str(error))])
        except ANY_FAULT:
            logger.exception("request %s can't be queued", request.request_id)
            self._tell([error_output(request.request_id, NOT_ADDED)])
        else:
            self._taken.add(request.request_id)

    def _tell(self, outputs: Sequence[RequestOutput]) -> None:
        if outputs:
            self._taken -= {o.request_id for o in outputs if o.finish_reason is not None}
            self._callbacks.outputs(outputs)

    def _restart(
        self, broken: EngineCore, make_core: Callable[[], EngineCore], error: BaseException
    ) -> EngineCore | None:
        """A core with the broken one's waiting requests; the others end in an error."""
        logger.error("the engine failed and starts again", exc_info=error)
        self._failure, self._state = _line(error), EngineState.RESTARTING
        self._tell(error.outputs if isinstance(error, EngineBrokenError) else ())
        lost = self._taken - broken.requests.waiting_ids
        self._tell([error_output(request_id, RESTARTING) for request_id in lost])
        broken.requests.give_up_running()
        while not self._stopping and self._budget.take():
            try:
                core = make_core()
                core.resume_from(broken)
            except ANY_FAULT as another:
                logger.exception("the engine can't start again")
                self._failure = _line(another)
                continue
            self._core, self._failure, self._state = core, None, EngineState.READY
            logger.warning("the engine works again; %d requests wait", len(self._taken))
            return core
        if not self._stopping:
            logger.error("the engine failed too often and stops: %s", self._failure)
            self._state = EngineState.DEAD
            self._callbacks.died(DEAD)
        return None


def _line(error: BaseException) -> str:
    name = "" if isinstance(error, EngineBrokenError) else f"{type(error).__name__}: "
    return " ".join(f"{name}{error}".split())


def error_output(request_id: str, message: str) -> RequestOutput:
    """The last output of a request that the engine gives up."""
    return RequestOutput(
        request_id=request_id,
        text="",
        token_ids=(),
        usage=Usage(0, 0, 0),
        finish_reason=FinishReason.ERROR,
        error=message,
    )
