"""POST /v1/chat/completions."""

from __future__ import annotations

import uuid

from fastapi import APIRouter, Request, Response

from server.apis.chat.old_functions import uses_old_form
from server.apis.chat.prompt import api_names, check, prepare_chat
from server.apis.chat.render import ChatRenderer, ChatUpdate
from server.apis.chat.schema import ChatCompletion, ChatRequest
from server.apis.shared.http.json_route import JsonRoute
from server.apis.shared.http.openapi import whole_or_streamed
from server.apis.shared.prompt.sampling import num_choices
from server.apis.shared.render.head import response_head
from server.apis.shared.render.usage import UsageReport
from server.apis.shared.respond import Submission, respond
from server.context import Context

router = APIRouter(route_class=JsonRoute, tags=["OpenAI"])
responses = whole_or_streamed(ChatCompletion)


@router.post(
    "/v1/chat/completions", summary="Answer a chat", response_model=None, responses=responses
)
async def create_chat_completion(body: ChatRequest, request: Request, context: Context) -> Response:
    context.require_model(body.model)
    check(body, context.config.limits)
    n = num_choices(body, context.config.limits)
    usage = UsageReport.of(body)
    calls_functions = uses_old_form(body)

    async def prepare() -> Submission[ChatUpdate]:
        turn = await prepare_chat(body, context)
        response_id = f"chatcmpl-{uuid.uuid4().hex}"
        renderer = ChatRenderer(
            response_head(context, response_id, body.model),
            num_choices=n,
            answer_format=turn.answer_format,
            prompt_token_ids=turn.prompt.token_ids if body.return_token_ids else None,
            with_logprobs=bool(body.logprobs),
            usage=usage,
            calls_functions=calls_functions,
        )
        return Submission(response_id, [turn.prompt], renderer, num_choices=n)

    return await respond(request, context, prepare, stream=body.stream, names=api_names(body))
