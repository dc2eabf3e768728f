"""POST /v1/messages and /v1/messages/count_tokens, in Anthropic's shape."""

from __future__ import annotations

import uuid
from typing import Any

from fastapi import APIRouter, Request, Response

from engine.request import RequestError
from server.apis.messages.prompt import chat_options, conversation, response_format, tool_selection
from server.apis.messages.render import MessagesRenderer
from server.apis.messages.schema import (
    AnthropicError,
    CountTokensRequest,
    MessageBody,
    MessagesRequest,
    RedactedThinkingBlock,
    ThinkingBlock,
    TokenCount,
    ToolResultBlock,
    ToolUseBlock,
)
from server.apis.shared.generation import Generation
from server.apis.shared.json_route import JsonRoute
from server.apis.shared.openapi import whole_or_streamed
from server.apis.shared.prompt.call_grammar import forced_call
from server.apis.shared.prompt.turn import Turn, encode_turn, prepare_turn
from server.apis.shared.prompt.unsupported import UNSUPPORTED_MESSAGES, refuse_unsupported
from server.apis.shared.respond import answer, json_response
from server.apis.shared.schema.sampling import SamplingFields
from server.context import Context, ServerContext
from server.errors import in_api_terms
from server.middleware.disconnect import run_until_disconnect

router = APIRouter(route_class=JsonRoute, tags=["Anthropic"])
errors: dict[int | str, dict[str, Any]] = {"4XX": {"model": AnthropicError}}

_PARAMS = {
    "prompt": "messages",
    "stop": "stop_sequences",
    "response_format.json_schema.schema": "output_config.format.schema",
}
"""The engine's names of fields that are called otherwise here."""

_OLDER_PARAMS = {"response_format.json_schema.schema": "output_format.schema"}

_MISPLACED = {
    "assistant": (ToolResultBlock,),
    "user": (ToolUseBlock, ThinkingBlock, RedactedThinkingBlock),
    "system": (ToolUseBlock, ToolResultBlock, ThinkingBlock, RedactedThinkingBlock),
}
"""Blocks by the roles in whose messages they can't stand."""


@router.post(
    "/v1/messages",
    summary="Answer a conversation, in Anthropic's shape",
    response_model=None,
    responses=whole_or_streamed(MessageBody, AnthropicError),
)
async def create_message(body: MessagesRequest, request: Request, context: Context) -> Response:
    return await run_until_disconnect(request.receive, _answer(body, context))


@router.post(
    "/v1/messages/count_tokens",
    summary="Count the tokens of a conversation",
    response_model=None,
    responses={200: {"model": TokenCount}, **errors},
)
async def count_tokens(body: CountTokensRequest, context: Context) -> Response:
    _check(body, context)
    options = chat_options(body, tool_selection(body))
    token_ids = await encode_turn(context, conversation(body), options)
    return json_response(TokenCount(input_tokens=len(token_ids)))


async def _answer(body: MessagesRequest, context: ServerContext) -> Response:
    _check(body, context)
    response_id = f"msg_{uuid.uuid4().hex}"
    try:
        turn = await _prepare(body, context)
        generation = Generation.submit(
            context.engine,
            [turn.prompt],
            num_choices=1,
            response_id=response_id,
            ticket=context.ticket,
        )
    except RequestError as error:
        names = _PARAMS if body.output_format is None else {**_PARAMS, **_OLDER_PARAMS}
        raise in_api_terms(error, names) from error
    head = context.response_head(response_id, body.model)
    renderer = MessagesRenderer(head, turn.answer_format.parser())
    return await answer(generation, renderer, stream=bool(body.stream))


async def _prepare(body: MessagesRequest, context: ServerContext) -> Turn:
    fields = SamplingFields(
        model=body.model,
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        stop=body.stop_sequences,
        response_format=response_format(body),
    )
    selection = tool_selection(body)
    one_call = body.tool_choice is not None and bool(body.tool_choice.disable_parallel_tool_use)
    return await prepare_turn(
        context,
        conversation(body),
        chat_options(body, selection),
        fields,
        max_tokens=body.max_tokens,
        logprobs=None,
        max_calls=1 if one_call else None,
        forced=forced_call(selection.choice),
    )


def _check(body: CountTokensRequest, context: ServerContext) -> None:
    context.require_model(body.model)
    refuse_unsupported(body.model_extra, UNSUPPORTED_MESSAGES)
    for number, message in enumerate(body.messages):
        if isinstance(message.content, str):
            continue
        for position, block in enumerate(message.content):
            if isinstance(block, _MISPLACED[message.role]):
                param = f"messages.{number}.content.{position}"
                raise RequestError(
                    f"'{param}': a {block.type} block can't stand in a message of the "
                    f"{message.role}.",
                    param=param,
                )
