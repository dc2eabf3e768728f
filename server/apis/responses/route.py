"""POST /v1/responses, GET and DELETE /v1/responses/{id}."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from engine.request import ChatOptions, RequestError
from server.apis.responses.prompt import (
    MessageBuilder,
    add_answer,
    add_input,
    chat_tool_choice,
    chat_tools,
    with_instructions,
)
from server.apis.responses.render import ResponsesRenderer
from server.apis.responses.schema import (
    DeletedResponse,
    FlatSchemaFormat,
    FunctionTool,
    ResponseBody,
    ResponsesRequest,
)
from server.apis.responses.store import StoredResponse
from server.apis.responses.truncation import without_oldest_turns
from server.apis.responses.unserved_tools import served_tools
from server.apis.shared.generation import Generation
from server.apis.shared.json_route import JsonRoute
from server.apis.shared.openapi import whole_or_streamed
from server.apis.shared.prompt.call_grammar import forced_call
from server.apis.shared.prompt.conversation import (
    Message,
    effort_args,
    select_tools,
    template_args,
    template_tools,
)
from server.apis.shared.prompt.turn import Turn, prepare_turn
from server.apis.shared.prompt.unsupported import UNSUPPORTED_RESPONSES, refuse_unsupported
from server.apis.shared.render.blocks import Block
from server.apis.shared.respond import answer, json_response
from server.apis.shared.schema.common import ErrorBody
from server.apis.shared.schema.sampling import SamplingFields
from server.apis.shared.schema.structured import JsonSchemaFormat, ResponseFormat
from server.context import Context, ServerContext
from server.errors import ApiError, in_api_terms
from server.middleware.disconnect import run_until_disconnect

router = APIRouter(route_class=JsonRoute, tags=["OpenAI"])
reading_router = APIRouter(tags=["OpenAI"])
errors: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorBody}}
found: dict[int | str, dict[str, Any]] = {200: {"model": ResponseBody}, **errors}

_PARAMS = {"prompt": "input", "messages": "input", "max_tokens": "max_output_tokens"}
"""The engine's names of fields that are called otherwise here."""

_FORMAT_PARAMS = {
    "response_format": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
}

_INCLUDABLE = frozenset(
    {
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "reasoning.encrypted_content",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)
"""Reasoning comes in clear in any case; the rest belongs to items that no answer has."""


@router.post(
    "/v1/responses",
    summary="Answer, and keep the answer for a next turn",
    response_model=None,
    responses=whole_or_streamed(ResponseBody),
)
async def create_response(body: ResponsesRequest, request: Request, context: Context) -> Response:
    return await run_until_disconnect(request.receive, _respond(body, context))


@reading_router.get(
    "/v1/responses/{response_id}",
    summary="Fetch a kept response",
    response_model=None,
    responses=found,
)
async def get_response(response_id: str, context: Context) -> Response:
    return Response(_stored(response_id, context).body, media_type="application/json")


@reading_router.delete(
    "/v1/responses/{response_id}",
    summary="Forget a kept response",
    response_model=None,
    responses={200: {"model": DeletedResponse}, **errors},
)
async def delete_response(response_id: str, context: Context) -> Response:
    if not context.responses.delete(context.ticket.client, response_id):
        raise _not_found(response_id)
    return json_response(DeletedResponse(id=response_id, object="response", deleted=True))


async def _respond(body: ResponsesRequest, context: ServerContext) -> Response:
    context.require_model(body.model)
    _check(body)
    tools = served_tools(body.tools)
    conversation = MessageBuilder()
    if body.previous_response_id is not None:
        previous = _stored(body.previous_response_id, context, "previous_response_id")
        conversation = MessageBuilder(previous.messages)
    add_input(conversation, body)
    messages = with_instructions(body.instructions, conversation.messages)
    response_id = f"resp_{uuid.uuid4().hex}"
    try:
        turn = await _prepare(body, tools, messages, context)
        renderer = ResponsesRenderer(
            _settings(body, tools, turn, response_id, context),
            turn.answer_format.parser(),
            _keep(body, response_id, conversation, context),
        )
        # Another id than the response's: the engine shows its ids, and this one gives access.
        generation = Generation.submit(
            context.engine,
            [turn.prompt],
            num_choices=1,
            response_id=f"gen-{uuid.uuid4().hex}",
            ticket=context.ticket,
        )
    except RequestError as error:
        has_format = body.text is not None and body.text.format is not None
        names = {**_PARAMS, **(_FORMAT_PARAMS if has_format else {})}
        raise in_api_terms(error, names) from error
    return await answer(generation, renderer, stream=bool(body.stream))


def _check(body: ResponsesRequest) -> None:
    refuse_unsupported(body.model_extra, UNSUPPORTED_RESPONSES)
    if body.n not in (None, 1):
        raise RequestError("A response has one answer: 'n' must be 1.", param="n")
    for wanted in body.include or ():
        if wanted not in _INCLUDABLE:
            raise RequestError(
                f"'include' asks for {wanted[:64]!r}, which this server does not tell.",
                param="include",
                code="unsupported_parameter",
            )
    if body.response_format is not None and body.text is not None and body.text.format is not None:
        raise RequestError(
            "'text.format' and 'response_format' both shape the output; set only one of them.",
            param="response_format",
        )


async def _prepare(
    body: ResponsesRequest,
    tools: Sequence[FunctionTool],
    messages: tuple[Message, ...],
    context: ServerContext,
) -> Turn:
    selection = select_tools(chat_tools(tools), chat_tool_choice(body.tool_choice))
    effort = body.reasoning.effort if body.reasoning else None
    args = {**effort_args(effort), **template_args(body.chat_template_kwargs)}
    options = ChatOptions(tools=template_tools(selection.tools), template_args=args)
    fields = _sampling_fields(body)

    if body.truncation == "auto":
        messages = await without_oldest_turns(context, messages, options, body.max_output_tokens)
    return await prepare_turn(
        context,
        messages,
        options,
        fields,
        max_tokens=body.max_output_tokens,
        logprobs=None,
        max_calls=1 if body.parallel_tool_calls is False else None,
        forced=forced_call(selection.choice),
    )


def _sampling_fields(body: ResponsesRequest) -> SamplingFields:
    """The request's, with its format where the chat API has it."""
    if body.text is None or body.text.format is None:
        return body
    chosen: ResponseFormat
    if isinstance(body.text.format, FlatSchemaFormat):
        chosen = JsonSchemaFormat(type="json_schema", json_schema=body.text.format)
    else:
        chosen = body.text.format
    return body.model_copy(update={"response_format": chosen})


def _settings(
    body: ResponsesRequest,
    tools: Sequence[FunctionTool],
    turn: Turn,
    response_id: str,
    context: ServerContext,
) -> dict[str, Any]:
    head = context.response_head(response_id, body.model)
    params = turn.prompt.params
    choice = body.tool_choice or "auto"
    text = {"format": {"type": "text"}}
    if body.text is not None:
        text |= body.text.model_dump(by_alias=True, exclude_none=True)
    return {
        "id": response_id,
        "created_at": head["created"],
        "model": head["model"],
        "error": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "store": body.store is not False,
        "temperature": params.temperature,
        "text": text,
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [tool.model_dump() for tool in tools],
        "top_p": params.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }


def _keep(
    body: ResponsesRequest,
    response_id: str,
    conversation: MessageBuilder,
    context: ServerContext,
) -> Callable[[ResponseBody, Sequence[Block]], None]:
    """Stores the final response unless the client does not want it."""

    def keep(final: ResponseBody, blocks: Sequence[Block]) -> None:
        if body.store is not False:
            add_answer(conversation, blocks)
            stored = StoredResponse(final.to_json().encode(), tuple(conversation.messages))
            context.responses.put(context.ticket.client, response_id, stored)

    return keep


def _stored(response_id: str, context: ServerContext, param: str = "response_id") -> StoredResponse:
    stored = context.responses.get(context.ticket.client, response_id)
    if stored is None:
        raise _not_found(response_id, param)
    return stored


def _not_found(response_id: str, param: str = "response_id") -> ApiError:
    return ApiError(
        404,
        f"The server has no response {response_id[:64]!r}; it keeps a limited number.",
        param=param,
        code="response_not_found",
    )
