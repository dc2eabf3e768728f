"""GrammarTrials: has clients' grammars compiled in processes that end with their time."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing import Pipe
from typing import TYPE_CHECKING

from engine.request import GrammarSpec, RequestError
from engine.sampling.refusal import refusal

if TYPE_CHECKING:  # it loads native code that nothing needs here
    from engine.sampling.grammar_tokens import TokenTable

logger = logging.getLogger(__name__)

_START_SECONDS = 60.0
"""For a process to start and to index the vocabulary, on a machine that has much else to do."""


_CLOSED = "no grammar is compiled any more"


class GrammarProcessError(RuntimeError):
    """A process for grammars can't be started, or the trials have been closed."""


class GrammarTrials:
    """A few processes, started when they are needed and kept.

    A grammar that compiles there in time and memory does so here too: the work is the same. Its
    methods may be called from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Process] = []
        self._busy: set[_Process] = set()
        self._closed = False

    @property
    def process_ids(self) -> list[int]:
        with self._lock:
            return [process.id for process in (*self._idle, *self._busy)]

    @property
    def needs_process(self) -> bool:
        """Whether the next grammar would have to wait until a process has started."""
        with self._lock:
            return not self._idle and not self._closed

    def check(self, spec: GrammarSpec, table: Callable[[], TokenTable], time_limit: float) -> None:
        """Compile a grammar on trial; waits for that.

        Args:
            table: makes the model's vocabulary, always the same, for a process that starts.
            time_limit: seconds.

        Raises:
            RequestError: it can't be used, or takes longer, or ends the process.
            GrammarProcessError: there is no process for it.
        """
        process = self._take(table)
        answer = None
        try:
            answer = process.ask(spec, time_limit)
        except TimeoutError:
            raise RequestError(
                f"The output grammar takes longer than {time_limit:g} s to compile; simplify it.",
                param="grammar",
            ) from None
        except (EOFError, OSError) as error:
            if self._closed:
                raise GrammarProcessError(_CLOSED) from error
            raise refusal("compiling it takes too much memory or fails") from None
        finally:
            self._give_back(process, works=answer is not None)
        if answer:
            raise RequestError(answer, param="grammar")

    def warm_up(self, table: Callable[[], TokenTable]) -> None:
        """Have a process ready, so that the next grammar needn't wait for one."""
        if not self.needs_process:
            return
        try:
            self._give_back(self._take(table), works=True)
        except GrammarProcessError as error:
            if not self._closed:
                logger.warning("%s", error)

    def close(self) -> None:
        """End all processes, also those at work. Idempotent."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for process in self._busy:
                process.kill()
        for process in idle:
            process.end()

    def _take(self, table: Callable[[], TokenTable]) -> _Process:
        with self._lock:
            if self._closed:
                raise GrammarProcessError(_CLOSED)
            while self._idle:
                process = self._idle.pop()
                if process.lives:
                    self._busy.add(process)
                    return process
                process.end()
            try:
                process = _Process()
            except OSError as error:
                raise GrammarProcessError(f"no process can be started: {error}") from error
            self._busy.add(process)
        try:
            process.prepare(table())
        except BaseException as error:
            self._give_back(process, works=False)
            if isinstance(error, EOFError | OSError):  # a TimeoutError is an OSError
                raise GrammarProcessError("a process for grammars does not start") from error
            raise
        return process

    def _give_back(self, process: _Process, *, works: bool) -> None:
        with self._lock:
            self._busy.discard(process)
            if works and not self._closed:
                self._idle.append(process)
                return
        process.end()


class _Process:
    """One child and the connection to it; used by one thread at a time, but for `kill`."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        try:
            self._process = subprocess.Popen(  # noqa: S603
                [
                    *(sys.executable, "-P", "-m", "engine.sampling.grammar_process"),
                    str(theirs.fileno()),
                ],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # A panic would quote the client's grammar in the server's log.
                stderr=subprocess.DEVNULL,
                # A terminal's Ctrl+C is for the server alone, which ends its processes itself.
                start_new_session=True,
            )
        except OSError:
            self._connection.close()
            raise
        finally:
            theirs.close()

    @property
    def id(self) -> int:
        return self._process.pid

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    def prepare(self, table: TokenTable) -> None:
        self._connection.send(table)
        self._answer(_START_SECONDS)

    def ask(self, spec: GrammarSpec, seconds: float) -> str:
        """Why a grammar must be refused; empty: it needn't be."""
        self._connection.send((spec, seconds))
        return self._answer(seconds)

    def kill(self) -> None:
        """From any thread: what waits for an answer raises EOFError."""
        self._process.kill()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._connection.close()

    def _answer(self, seconds: float) -> str:
        if not self._connection.poll(seconds):
            raise TimeoutError
        return self._connection.recv_bytes().decode()
