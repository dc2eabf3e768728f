"""AsyncEngine: the engine's face for asyncio; the core runs in a thread of its own."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.config import RecoveryConfig
from engine.fault import ANY_FAULT
from engine.figures import EngineMetrics
from engine.preparation import Preparation
from engine.request import (
    ANSWER_NEXT,
    ChatOptions,
    EngineDeadError,
    GenerationRequest,
    GrammarSpec,
    QueueFullError,
    RequestOutput,
    SamplingDefaults,
)
from engine.serving.admission import ModelLimits
from engine.serving.engine_thread import Abort, Add, Callbacks, EngineThread, error_output
from engine.serving.engine_thread import EngineState as EngineState
from engine.serving.output_stream import OutputStream as OutputStream
from engine.serving.pace import Pace
from engine.serving.request_workers import RequestWorkers
from engine.summary import EngineSummary

if TYPE_CHECKING:  # torch and transformers take seconds to import; `load` imports them
    from engine.core import EngineCore
    from engine.sampling.grammar_compiler import CompiledGrammar
    from engine.text.tokenizer import TextTokenizer

logger = logging.getLogger(__name__)

_READ_ATTEMPTS = 20
_STOP_SECONDS = 10.0
"""How long a step in progress may hold up a stop."""
NOT_DELIVERED = "The engine failed to deliver this request's output; see the server's log."
TOO_SLOW = "The client does not read its stream: {} outputs wait, and the request was ended."


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What the API tells about the served model."""

    name: str
    created: int
    """Unix time of the load."""
    max_context: int


class AsyncEngine:
    """Runs one `EngineCore` for many coroutines of one event loop."""

    def __init__(
        self,
        load: Callable[[], Callable[[], EngineCore]],
        *,
        max_requests: int,
        recovery: RecoveryConfig | None = None,
    ) -> None:
        """
        Args:
            load: loads the models; the result makes a core of them, and another one when that has
                broken. Called in the engine's thread.
            max_requests: requests the engine holds at once, running and waiting.
            recovery: default: the configuration's defaults.
        """
        self._recovery = recovery or RecoveryConfig()
        self._max_requests = max_requests
        self._created = int(time.time())
        self._streams: dict[str, OutputStream] = {}
        self._pace = Pace()
        self._workers = RequestWorkers()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loaded: asyncio.Future[None] | None = None
        self._thread = EngineThread(
            load,
            self._recovery,
            Callbacks(
                loaded=lambda error: self._in_loop(self._end_load, error),
                outputs=lambda outputs: self._in_loop(self._deliver, outputs),
                died=lambda message: self._in_loop(self._fail_streams, message),
            ),
        )

    @property
    def state(self) -> EngineState:
        return self._thread.state

    @property
    def failure(self) -> str | None:
        """What is wrong with the engine, in one line."""
        return self._thread.failure

    @property
    def card(self) -> ModelCard:
        core = self._ready_core()
        return ModelCard(core.model_name, self._created, core.limits.max_context)

    @property
    def limits(self) -> ModelLimits:
        return self._ready_core().limits

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        return self._ready_core().sampling_defaults

    @property
    def tokenizer(self) -> TextTokenizer:
        """Thread-safe; heavy calls belong in `encode` and `encode_chat`, off the event loop."""
        return self._ready_core().tokenizer

    @property
    def num_requests(self) -> int:
        """Requests in the engine whose stream has not ended."""
        return len(self._streams)

    @property
    def expected_wait(self) -> float:
        """Seconds until the requests that wait now have left the queue, at the recent pace.

        What those who are refused are told in Retry-After.
        """
        core = self._thread.core
        waiting = 0 if core is None else core.metrics.waiting
        return self._pace.seconds_for(1 + waiting)

    @property
    def drafters(self) -> tuple[str, ...]:
        """Names of the loaded drafters."""
        return tuple(drafter.name for drafter in self._ready_core().speculator.drafters)

    def summary(self) -> EngineSummary:
        """Facts about what was loaded, for people."""
        from engine.build import summarize

        return summarize(self._ready_core())

    def metrics(self) -> EngineMetrics:
        """The live figures (written by the engine's thread, so only read them)."""
        return self._ready_core().metrics

    def speculation(self) -> dict[str, Any]:
        """The speculator's estimates and current choices, JSON types only."""
        speculator = self._ready_core().speculator
        for _ in range(_READ_ATTEMPTS - 1):
            try:
                return speculator.state()
            except RuntimeError:  # the engine's thread added an entry while it was read
                continue
        return speculator.state()

    async def start(self) -> None:
        """Load the models; returns when requests can be served.

        Raises:
            Exception: whatever the load raised; the engine is then dead.
        """
        self._loop = asyncio.get_running_loop()
        self._loaded = self._loop.create_future()
        self._thread.start()
        await self._loaded
        if self._thread.core is not None:
            self._workers.warm_up(self._thread.core.grammars)

    async def stop(self) -> None:
        """Stop the engine's thread; requests still running end with an error output.

        The end for good: nothing can be prepared any more. Idempotent.
        """
        await asyncio.to_thread(self._thread.stop, _STOP_SECONDS)
        self._fail_streams("The server is shutting down.")
        await asyncio.to_thread(self._workers.stop)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; control tokens written in it are parsed as such."""
        encode = self.tokenizer.encode
        return await self._workers.text(encode, text, add_special_tokens=add_special_tokens)

    async def decode(self, token_ids: Iterable[int]) -> str:
        """The text of tokens, without control tokens."""
        return await self._workers.text(self.tokenizer.decode, token_ids)

    async def encode_infill(self, prefix: str, suffix: str) -> list[int]:
        """Token ids of a prompt for the text between two texts.

        Raises:
            RequestError: the model has no infill tokens.
        """
        return await self._workers.text(self.tokenizer.encode_infill, prefix, suffix)

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], options: ChatOptions = ANSWER_NEXT
    ) -> list[int]:
        """Token ids of a conversation under the model's chat template, ready for the answer.

        Raises:
            RequestError: the template refuses the messages, or the model has no template.
        """
        return await self._workers.text(self.tokenizer.encode_chat, messages, options)

    async def compile_grammar(self, spec: GrammarSpec, *, time_limit: float) -> CompiledGrammar:
        """Make a grammar ready.

        Args:
            time_limit: seconds; a compilation that takes longer is ended.

        Raises:
            RequestError: the grammar can't be used, or takes too long.
        """
        return await self._workers.compile(self._ready_core().grammars, spec, time_limit)

    async def prepare(
        self, request: GenerationRequest, grammar: CompiledGrammar | None = None
    ) -> Preparation:
        """Do for a request, and all that differ from it in id and seed, what takes its time.

        Args:
            grammar: the request's, compiled.

        Raises:
            RequestError: the loaded model can't serve it.
        """
        core = self._ready_core()

        def prepare() -> Preparation:
            core.limits.check(request)
            return core.preparer.prepare(request, grammar)

        return await self._workers.text(prepare)

    def submit(self, request: GenerationRequest, preparation: Preparation) -> OutputStream:
        """Queue a request that was prepared.

        Raises:
            QueueFullError: the engine holds `max_requests` requests already.
            EngineDeadError: the engine is not ready.
        """
        self._ready_core()
        if len(self._streams) >= self._max_requests:
            message = f"The server already holds {self._max_requests} requests."
            raise QueueFullError(message, self.expected_wait)
        if request.request_id in self._streams:
            raise ValueError(f"request id {request.request_id!r} is already in use")
        stream = OutputStream(self, request.request_id)
        self._streams[request.request_id] = stream
        self._pace.enter()
        self._thread.post(Add(request, preparation))
        return stream

    def abort(self, request_id: str) -> None:
        """Forget a request; nothing happens when it has ended already."""
        if self._streams.pop(request_id, None) is not None:
            self._pace.leave()
            self._thread.post(Abort(request_id))

    def _ready_core(self) -> EngineCore:
        core, state = self._thread.core, self.state
        if core is None or not state.takes_requests:
            detail = f": {self.failure}" if self.failure else ""
            raise EngineDeadError(f"The engine is {state}{detail}.")
        return core

    def _in_loop(self, call: Callable[[Any], None], argument: Any) -> None:
        """Call it in the event loop; nobody listens any more when that is closed."""
        if self._loop is not None and not self._loop.is_closed():
            with suppress(RuntimeError):  # it was closed just now
                self._loop.call_soon_threadsafe(call, argument)

    def _end_load(self, error: BaseException | None) -> None:
        if self._loaded is None or self._loaded.done():
            return
        if error is None:
            self._loaded.set_result(None)
        else:
            self._loaded.set_exception(error)

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            try:
                self._put(stream, output)
            except ANY_FAULT:
                # The event loop would only log it, and this and the other streams would hang.
                logger.exception("request %s: its output can't be delivered", output.request_id)
                self._streams.pop(output.request_id, None)
                self._thread.post(Abort(output.request_id))
                stream.put(error_output(output.request_id, NOT_DELIVERED))

    def _put(self, stream: OutputStream, output: RequestOutput) -> None:
        if output.finish_reason is not None:
            del self._streams[output.request_id]
            self._pace.leave()
        elif stream.num_unread >= self._recovery.max_unread_outputs:
            self.abort(output.request_id)
            output = error_output(output.request_id, TOO_SLOW.format(stream.num_unread))
        stream.put(output)

    def _fail_streams(self, message: str) -> None:
        streams, self._streams = self._streams, {}
        for request_id, stream in streams.items():
            self._pace.leave()
            stream.put(error_output(request_id, message))
