"""POST /v1/messages and /v1/messages/count_tokens, in Anthropic's shape."""

from __future__ import annotations

import uuid

from fastapi import APIRouter, Request, Response

from server.apis.messages.prompt import api_names, check, encode_message, prepare_message
from server.apis.messages.render import MessagesRenderer, MessagesUpdate
from server.apis.messages.schema import (
    CountTokensRequest,
    MessageBody,
    MessagesRequest,
    TokenCount,
)
from server.apis.shared.http.json_response import json_response
from server.apis.shared.http.json_route import JsonRoute
from server.apis.shared.http.openapi import whole, whole_or_streamed
from server.apis.shared.render.head import response_head
from server.apis.shared.respond import Submission, respond
from server.apis.shared.schema.error import AnthropicError
from server.context import Context

router = APIRouter(route_class=JsonRoute, tags=["Anthropic"])


@router.post(
    "/v1/messages",
    summary="Answer a conversation, in Anthropic's shape",
    response_model=None,
    responses=whole_or_streamed(MessageBody, AnthropicError),
)
async def create_message(body: MessagesRequest, request: Request, context: Context) -> Response:
    context.require_model(body.model)
    check(body)

    async def prepare() -> Submission[MessagesUpdate]:
        turn = await prepare_message(body, context)
        response_id = f"msg_{uuid.uuid4().hex}"
        head = response_head(context, response_id, body.model)
        renderer = MessagesRenderer(head, turn.answer_format.parser())
        return Submission(response_id, [turn.prompt], renderer)

    return await respond(request, context, prepare, stream=body.stream, names=api_names(body))


@router.post(
    "/v1/messages/count_tokens",
    summary="Count the tokens of a conversation",
    response_model=None,
    responses=whole(TokenCount, AnthropicError),
)
async def count_tokens(body: CountTokensRequest, context: Context) -> Response:
    context.require_model(body.model)
    check(body)
    return json_response(TokenCount(input_tokens=len(await encode_message(body, context))))
