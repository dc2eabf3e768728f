"""POST /v1/chat/completions."""

from __future__ import annotations

import uuid

from fastapi import APIRouter, Request, Response

from engine.request import RequestError
from server.apis.chat.old_functions import PARAMS, in_new_form, tools_and_choice, uses_old_form
from server.apis.chat.render import ChatRenderer
from server.apis.chat.schema import ChatCompletion, ChatRequest
from server.apis.shared.generation import Generation
from server.apis.shared.json_route import JsonRoute
from server.apis.shared.openapi import whole_or_streamed
from server.apis.shared.prompt.call_grammar import forced_call
from server.apis.shared.prompt.conversation import chat_options, select_tools, template_messages
from server.apis.shared.prompt.sampling import check_logprobs, num_choices, usage_report
from server.apis.shared.prompt.turn import Turn, prepare_turn
from server.apis.shared.prompt.unsupported import (
    UNSUPPORTED_CHAT,
    UNSUPPORTED_MESSAGE,
    refuse_unsupported,
)
from server.apis.shared.respond import answer
from server.context import Context, ServerContext
from server.errors import in_api_terms
from server.middleware.disconnect import run_until_disconnect

router = APIRouter(route_class=JsonRoute, tags=["OpenAI"])
responses = whole_or_streamed(ChatCompletion)


@router.post(
    "/v1/chat/completions", summary="Answer a chat", response_model=None, responses=responses
)
async def create_chat_completion(body: ChatRequest, request: Request, context: Context) -> Response:
    return await run_until_disconnect(request.receive, _complete_chat(body, context))


async def _complete_chat(body: ChatRequest, context: ServerContext) -> Response:
    context.require_model(body.model)
    _check(body, context)
    n = num_choices(body, context.config.limits)
    usage = usage_report(body)
    response_id = f"chatcmpl-{uuid.uuid4().hex}"
    is_old = uses_old_form(body)
    try:
        turn = await _prepare(body, context, is_old=is_old)
        renderer = ChatRenderer(
            context.response_head(response_id, body.model),
            num_choices=n,
            answer_format=turn.answer_format,
            prompt_token_ids=turn.prompt.token_ids if body.return_token_ids else None,
            with_logprobs=bool(body.logprobs),
            usage=usage,
            calls_functions=is_old,
        )
        generation = Generation.submit(
            context.engine,
            [turn.prompt],
            num_choices=n,
            response_id=response_id,
            ticket=context.ticket,
        )
    except RequestError as error:
        names = {"prompt": "messages", **(PARAMS if is_old else {})}
        if body.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        raise in_api_terms(error, names) from error
    return await answer(generation, renderer, stream=bool(body.stream))


async def _prepare(body: ChatRequest, context: ServerContext, *, is_old: bool) -> Turn:
    selection = select_tools(*tools_and_choice(body))
    one_call = is_old or body.parallel_tool_calls is False
    return await prepare_turn(
        context,
        template_messages(in_new_form(body.messages)),
        chat_options(
            body.messages,
            selection.tools,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            args=body.chat_template_kwargs,
            reasoning_effort=body.reasoning_effort,
        ),
        body,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        max_calls=1 if one_call else None,
        forced=forced_call(selection.choice),
    )


def _check(body: ChatRequest, context: ServerContext) -> None:
    refuse_unsupported(body.model_extra, UNSUPPORTED_CHAT)
    for number, message in enumerate(body.messages):
        refuse_unsupported(message.model_extra, UNSUPPORTED_MESSAGE, prefix=f"messages.{number}.")
    if body.top_logprobs is not None:
        if body.top_logprobs and not body.logprobs:
            raise RequestError(
                "'top_logprobs' is only allowed when 'logprobs' is true.", param="top_logprobs"
            )
        check_logprobs(body.top_logprobs, context.config.limits, "top_logprobs")
    both_limits = body.max_tokens is not None and body.max_completion_tokens is not None
    if both_limits and body.max_tokens != body.max_completion_tokens:
        raise RequestError(
            "'max_tokens' and 'max_completion_tokens' differ; set only one of them.",
            param="max_tokens",
        )
