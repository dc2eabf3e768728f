"""Being told when a response begins."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import Message, Send


def noting_start(send: Send, on_start: Callable[[Message], None]) -> Send:
    """A `send` that first gives `on_start` the message which begins the response."""

    async def send_noting_start(message: Message) -> None:
        if message["type"] == "http.response.start":
            on_start(message)
        await send(message)

    return send_noting_start
