"""From a request to its HTTP response, streamed or whole: the way that every API goes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from fastapi import Request, Response

from engine.request import RequestError
from server.apis.shared.generation import Generation
from server.apis.shared.http.disconnect import run_until_disconnect
from server.apis.shared.http.json_response import json_response
from server.apis.shared.http.sse import DONE, EventStream, encode_event
from server.apis.shared.prompt.prepared_prompt import PreparedPrompt
from server.apis.shared.render.renderer import Renderer
from server.context import ServerContext
from server.errors import in_api_terms

Update = TypeVar("Update")


@dataclass(frozen=True, slots=True)
class Submission(Generic[Update]):
    """What the engine is to generate, and who renders it."""

    generation_id: str
    """What the engine's ids of the sequences begin with."""
    prompts: Sequence[PreparedPrompt]
    renderer: Renderer[Update]
    num_choices: int = 1
    """Sequences for each prompt."""


async def respond(
    request: Request,
    context: ServerContext,
    prepare: Callable[[], Awaitable[Submission[Any]]],
    *,
    stream: bool | None,
    names: Mapping[str, str],
) -> Response:
    """Prepare, submit and answer a request; all of it ends as soon as its client goes away.

    Args:
        names: the API's names of the fields that the engine calls otherwise, as `in_api_terms`
            takes them.

    Raises:
        RequestError: it can't be served.
        QueueFullError, EngineDeadError: as `AsyncEngine.submit`.
    """

    async def work() -> Response:
        try:
            submission = await prepare()
            generation = Generation.submit(
                context.engine,
                submission.prompts,
                num_choices=submission.num_choices,
                response_id=submission.generation_id,
                ticket=context.ticket,
            )
        except RequestError as error:
            raise in_api_terms(error, names) from error
        return await _answer(generation, submission.renderer, stream=bool(stream))

    return await run_until_disconnect(request.receive, work())


async def _answer(generation: Generation, renderer: Renderer[Update], *, stream: bool) -> Response:
    """The response of a generation, which is closed when the response is over."""
    if stream:
        return EventStream(
            _events(generation, renderer),
            on_failure=renderer.failure,
            on_close=generation.close,
        )
    try:
        async with aclosing(generation.outputs()) as outputs:
            updates = [renderer.take(index, output) async for index, output in outputs]
    finally:
        generation.close()
    return json_response(renderer.response(updates, generation.usage))


async def _events(
    generation: Generation, renderer: Renderer[Update]
) -> AsyncGenerator[bytes, None]:
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
