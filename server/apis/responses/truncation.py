"""`truncation: "auto"`: a conversation over the context goes on without its oldest turns."""

from __future__ import annotations

from collections.abc import Sequence

from engine.request import ChatOptions
from server.apis.shared.prompt.message_builder import Message
from server.apis.shared.prompt.turn import encode_turn
from server.context import ServerContext

_ANSWER_SHARE = 4
"""One in so many tokens of the context is kept for an answer of no stated length."""


async def without_oldest_turns(
    context: ServerContext,
    messages: tuple[Message, ...],
    options: ChatOptions,
    max_tokens: int | None,
) -> tuple[Message, ...]:
    """A conversation with no room for the answer, less as few of its oldest turns as make it.

    A turn is a user's message with all that follows it up to the next one's. What stands in front
    of the first stays, and so does the last turn, whether it fits or not.

    Args:
        max_tokens: of the answer; None: the client names no limit.
    """
    limit = context.engine.limits.max_context
    room = limit // _ANSWER_SHARE if max_tokens is None else max_tokens
    starts = [n for n, message in enumerate(messages) if message["role"] == "user"]
    if len(starts) < 2:
        return messages
    low, high = 0, len(starts) - 1
    while low < high:
        middle = (low + high) // 2
        size = len(await encode_turn(context, _without(messages, starts, middle), options))
        low, high = (low, middle) if size + room <= limit else (middle + 1, high)
    return _without(messages, starts, low)


def _without(
    messages: tuple[Message, ...], starts: Sequence[int], num_dropped: int
) -> tuple[Message, ...]:
    return (*messages[: starts[0]], *messages[starts[num_dropped] :])
