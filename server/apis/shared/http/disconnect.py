"""Work that ends when its client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar, runtime_checkable

from starlette.types import Receive

from server.errors import ApiError

T = TypeVar("T")


class ClientDisconnectedError(ApiError):
    """The client closed the connection before it had its answer; nobody reads this error."""

    def __init__(self) -> None:
        super().__init__(499, "The client closed the connection.")


@runtime_checkable
class Closable(Protocol):
    """A result that holds on to something until it is closed, as a stream to its generation."""

    def close(self) -> None: ...


async def run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`; cancel it as soon as the client is gone. The request body must have been read.

    A `Closable` result that can't be returned, because the caller was cancelled meanwhile or the
    client went away, is closed.

    Raises:
        ClientDisconnectedError: the client went away; `work` has ended when this is raised.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_wait_for_disconnect(receive))
    handed_over = False
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        has_answer = working.done()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        if not has_answer:
            raise ClientDisconnectedError
        handed_over = True
        return working.result()
    finally:
        if not handed_over:
            working.cancel()
            watching.cancel()
            working.add_done_callback(_close_result)
            await asyncio.gather(working, watching, return_exceptions=True)


def _close_result(task: asyncio.Task[Any]) -> None:
    if task.cancelled() or task.exception() is not None:
        return
    result = task.result()
    if isinstance(result, Closable):
        result.close()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
