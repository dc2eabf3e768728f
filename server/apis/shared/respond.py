"""From a submitted generation to its HTTP response, streamed or whole."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

from fastapi import Response

from server.apis.shared.generation import Generation
from server.apis.shared.render.renderer import Renderer
from server.apis.shared.schema.common import ResponseModel
from server.apis.shared.sse import DONE, EventStream, encode_event

Piece = TypeVar("Piece")


def json_response(body: ResponseModel, status: int = 200) -> Response:
    return Response(body.to_json(), status_code=status, media_type="application/json")


async def answer(generation: Generation, renderer: Renderer[Piece], *, stream: bool) -> Response:
    """The response of a generation, which is closed when the response is over."""
    if stream:
        return EventStream(
            _events(generation, renderer),
            on_failure=renderer.failure,
            on_close=generation.close,
        )
    try:
        async with aclosing(generation.outputs()) as outputs:
            pieces = [renderer.take(index, output) async for index, output in outputs]
    finally:
        generation.close()
    return json_response(renderer.response(pieces, generation.usage))


async def _events(generation: Generation, renderer: Renderer[Piece]) -> AsyncGenerator[bytes, None]:
    for chunk in renderer.opening(generation.usage):
        yield encode_event(chunk)
    async with aclosing(generation.outputs()) as outputs:
        async for index, output in outputs:
            for chunk in renderer.chunks(renderer.take(index, output), generation.usage):
                yield encode_event(chunk)
    for chunk in renderer.closing(generation.usage):
        yield encode_event(chunk)
    if renderer.ends_with_done:
        yield DONE
