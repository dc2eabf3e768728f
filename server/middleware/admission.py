"""Who may come in: concurrency limits, deadlines, and nobody while the server drains."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.config import AdmissionConfig
from engine.serving.pace import Pace
from server.errors import ApiError, deadline_passed, retry_later
from server.middleware.auth import CLIENT
from server.middleware.response_start import noting_start

TICKET = "slipstream.ticket"
"""Key of the ASGI scope: the request's `Ticket`."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """On what terms a request was let in."""

    client: str = ""
    """Whose API key it has; empty without keys."""
    deadline: float | None = None
    """When its answer must be complete, on the event loop's clock; None: whenever it is."""
    queue_timeout: float | None = None
    """Seconds it may wait for the engine; None: any number."""


OPEN_TICKET = Ticket()


class Admission:
    """Counts the requests in progress. Used by one event loop."""

    def __init__(
        self, config: AdmissionConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """
        Args:
            clock: monotonic seconds.
        """
        self._config = config
        self._all = Pace(clock)
        self._by_client: defaultdict[str, Pace] = defaultdict(lambda: Pace(clock))
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False
        """Whether the server is shutting down: it finishes requests but takes no more."""

    @property
    def num_requests(self) -> int:
        return self._all.num_present

    def ticket(self, client: str) -> Ticket:
        """For a request of a client that arrives now."""
        timeout = self._config.request_timeout
        deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout
        return Ticket(client, deadline, self._config.queue_timeout)

    def enter(self, client: str) -> None:
        """Count one more request of a client; `leave` must follow.

        Raises:
            ApiError: it may not come in now; it is not counted.
        """
        if self.draining:
            raise retry_later(
                503, "The server is shutting down.", "shutting_down", self._seconds_to_the_end()
            )
        limit = self._config.max_requests
        if limit is not None and self.num_requests >= limit:
            raise retry_later(
                429,
                f"The server works on {limit} requests already.",
                "queue_full",
                self._all.seconds_for(1),
            )
        limit = self._config.max_requests_per_key
        own = self._by_client[client]
        if limit is not None and own.num_present >= limit:
            raise retry_later(
                429,
                f"This API key has {limit} requests in progress, which is its limit.",
                "rate_limit_exceeded",
                own.seconds_for(1),
            )
        own.enter()
        self._all.enter()
        self._idle.clear()

    def leave(self, client: str) -> None:
        self._by_client[client].leave()
        self._all.leave()
        if not self._all.num_present:
            self._idle.set()

    async def wait_until_idle(self) -> None:
        """Returns when no request is in progress."""
        await self._idle.wait()

    def _seconds_to_the_end(self) -> float:
        """Of a server that drains."""
        expected = self._all.seconds_for(self.num_requests)
        return min(expected, self._config.drain_timeout)


class AdmissionMiddleware:
    """Lets a POST request in or not, from its first body byte to the last byte of its answer."""

    def __init__(self, app: ASGIApp, admission: Admission) -> None:
        self._app = app
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        client = scope.get(CLIENT, "")
        scope = {**scope, TICKET: self._admission.ticket(client)}
        if scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        try:
            self._admission.enter(client)
        except ApiError as error:
            await error.to_response(scope["path"])(scope, receive, send)
            return
        try:
            await self._run(scope, receive, send)
        finally:
            self._admission.leave(client)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A stream that has begun watches the deadline itself: it ends with an error event."""
        started = False

        def note_start(_: Message) -> None:
            nonlocal started
            timer.reschedule(None)
            started = True

        try:
            async with asyncio.timeout_at(scope[TICKET].deadline) as timer:
                await self._app(scope, receive, noting_start(send, note_start))
        except TimeoutError:
            if started or not timer.expired():
                raise
            await deadline_passed().to_response(scope["path"])(scope, receive, send)
