"""Responses kept for a next turn: what is kept of one, and finding it again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from server.apis.responses.render import call_id
from server.apis.responses.schema import ResponseBody
from server.apis.responses.store import StoredResponse
from server.apis.shared.prompt.message_builder import MessageBuilder
from server.apis.shared.render.blocks import Block, BlockKind
from server.context import ServerContext
from server.errors import ApiError


def keeper(
    context: ServerContext, response_id: str, conversation: MessageBuilder
) -> Callable[[ResponseBody, Sequence[Block]], None]:
    """Stores the final response, and the conversation with it as its end."""

    def keep(final: ResponseBody, blocks: Sequence[Block]) -> None:
        _add_answer(conversation, blocks)
        stored = StoredResponse(final.to_json().encode(), tuple(conversation.messages))
        context.responses.put(context.ticket.client, response_id, stored)

    return keep


def find(context: ServerContext, response_id: str, param: str = "response_id") -> StoredResponse:
    """
    Args:
        param: where the request names the response.

    Raises:
        ApiError: 404, the client has no such response.
    """
    stored = context.responses.get(context.ticket.client, response_id)
    if stored is None:
        raise _not_found(response_id, param)
    return stored


def forget(context: ServerContext, response_id: str) -> None:
    """
    Raises:
        ApiError: 404, the client has no such response.
    """
    if not context.responses.delete(context.ticket.client, response_id):
        raise _not_found(response_id, "response_id")


def _add_answer(builder: MessageBuilder, blocks: Sequence[Block]) -> None:
    for block in blocks:
        if block.kind is BlockKind.TEXT:
            builder.add_text(block.text)
        elif block.kind is BlockKind.REASONING:
            builder.add_reasoning(block.text)
        else:
            builder.add_written_call(call_id(block), block.name, block.text)


def _not_found(response_id: str, param: str) -> ApiError:
    return ApiError(
        404,
        f"The server has no response {response_id[:64]!r}; it keeps a limited number.",
        param=param,
        code="response_not_found",
    )
