"""POST /v1/responses, GET and DELETE /v1/responses/{id}."""

from __future__ import annotations

import uuid

from fastapi import APIRouter, Request, Response

from server.apis.responses.history import find, forget, keeper
from server.apis.responses.prompt import add_input, api_names, check, prepare_response
from server.apis.responses.render import ResponsesRenderer, ResponseUpdate, response_settings
from server.apis.responses.schema import DeletedResponse, ResponseBody, ResponsesRequest
from server.apis.shared.http.json_response import json_response
from server.apis.shared.http.json_route import JsonRoute
from server.apis.shared.http.openapi import whole, whole_or_streamed
from server.apis.shared.prompt.message_builder import MessageBuilder
from server.apis.shared.prompt.tools import served_tools
from server.apis.shared.render.head import response_head
from server.apis.shared.respond import Submission, respond
from server.context import Context

router = APIRouter(route_class=JsonRoute, tags=["OpenAI"])
reading_router = APIRouter(tags=["OpenAI"])


@router.post(
    "/v1/responses",
    summary="Answer, and keep the answer for a next turn",
    response_model=None,
    responses=whole_or_streamed(ResponseBody),
)
async def create_response(body: ResponsesRequest, request: Request, context: Context) -> Response:
    context.require_model(body.model)
    check(body)
    tools = served_tools(body.tools)
    conversation = MessageBuilder()
    if body.previous_response_id is not None:
        previous = find(context, body.previous_response_id, "previous_response_id")
        conversation = MessageBuilder(previous.messages)
    add_input(conversation, body)

    async def prepare() -> Submission[ResponseUpdate]:
        turn = await prepare_response(body, tools, conversation.messages, context)
        response_id = f"resp_{uuid.uuid4().hex}"
        head = response_head(context, response_id, body.model)
        renderer = ResponsesRenderer(
            response_settings(body, tools, turn.prompt.params, head),
            turn.answer_format.parser(),
            None if body.store is False else keeper(context, response_id, conversation),
        )
        # Another id than the response's: the engine shows its ids, and this one gives access.
        return Submission(f"gen-{uuid.uuid4().hex}", [turn.prompt], renderer)

    return await respond(request, context, prepare, stream=body.stream, names=api_names(body))


@reading_router.get(
    "/v1/responses/{response_id}",
    summary="Fetch a kept response",
    response_model=None,
    responses=whole(ResponseBody),
)
async def get_response(response_id: str, context: Context) -> Response:
    return Response(find(context, response_id).body, media_type="application/json")


@reading_router.delete(
    "/v1/responses/{response_id}",
    summary="Forget a kept response",
    response_model=None,
    responses=whole(DeletedResponse),
)
async def delete_response(response_id: str, context: Context) -> Response:
    forget(context, response_id)
    return json_response(DeletedResponse(id=response_id, object="response", deleted=True))
