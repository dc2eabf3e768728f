"""OutputStream: one request's outputs, for the coroutine that waits for them."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Protocol, Self

from engine.request import RequestOutput


class Aborts(Protocol):
    """The engine, as far as a stream needs it."""

    def abort(self, request_id: str) -> None:
        """Forget a request; nothing happens when it has ended already."""


class OutputStream:
    """The outputs of one request, an async iterator to be used as an async context manager.

    Leaving the context before the last output aborts the request: its blocks are free again
    within one engine step.
    """

    def __init__(self, engine: Aborts, request_id: str) -> None:
        self._engine = engine
        self._request_id = request_id
        self._outputs: asyncio.Queue[RequestOutput] = asyncio.Queue()
        self._finished = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._finished:
            raise StopAsyncIteration
        output = await self._outputs.get()
        self._finished = output.finish_reason is not None
        return output

    def close(self) -> None:
        """Abort the request unless it has finished. Idempotent."""
        self._finished = True
        self._engine.abort(self._request_id)

    @property
    def num_unread(self) -> int:
        return self._outputs.qsize()

    def put(self, output: RequestOutput) -> None:
        self._outputs.put_nowait(output)
