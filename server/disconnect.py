"""Work that ends when its client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from server.errors import ApiError

T = TypeVar("T")


class ClientDisconnectedError(ApiError):
    """The client closed the connection before it had its answer; nobody reads this error."""

    def __init__(self) -> None:
        super().__init__(499, "The client closed the connection.")


async def run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`; cancel it as soon as the client is gone. The request body must have been read.

    Raises:
        ClientDisconnectedError: the client went away; `work` has ended when this is raised.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnectedError
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
