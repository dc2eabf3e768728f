"""POST /v1/completions."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from fastapi import APIRouter, Request, Response

from engine.request import TextPrompt
from server.apis.completions.best_of import BestOf
from server.apis.completions.prompt import check, num_candidates, prepare_prompts
from server.apis.completions.render import CompletionRenderer, CompletionUpdate, EchoedPrompt
from server.apis.completions.schema import Completion, CompletionRequest
from server.apis.shared.http.json_route import JsonRoute
from server.apis.shared.http.openapi import whole_or_streamed
from server.apis.shared.prompt.prepared_prompt import PreparedPrompt
from server.apis.shared.prompt.sampling import num_choices
from server.apis.shared.render.head import response_head
from server.apis.shared.render.usage import UsageReport
from server.apis.shared.respond import Submission, respond
from server.context import Context

router = APIRouter(route_class=JsonRoute, tags=["OpenAI"])
responses = whole_or_streamed(Completion)


@router.post("/v1/completions", summary="Continue a text", response_model=None, responses=responses)
async def create_completion(
    body: CompletionRequest, request: Request, context: Context
) -> Response:
    context.require_model(body.model)
    limits = context.config.limits
    check(body, limits)
    n = num_choices(body, limits)
    best_of = num_candidates(body, n, limits)
    usage = UsageReport.of(body)
    tokenizer = context.engine.tokenizer

    async def prepare() -> Submission[CompletionUpdate]:
        prompts = await prepare_prompts(body, context)
        candidates = [prompt for prompt in prompts for _ in range(best_of)]
        response_id = f"cmpl-{uuid.uuid4().hex}"
        renderer = CompletionRenderer(
            response_head(context, response_id, body.model),
            echoes=[
                _echo(prompt, tokenizer.token_bytes) if body.echo else None for prompt in candidates
            ],
            prompt_token_ids=[prompt.token_ids for prompt in candidates]
            if body.return_token_ids
            else None,
            best_of=BestOf(num_candidates=best_of, num_choices=n) if best_of > n else None,
            with_logprobs=body.logprobs is not None,
            usage=usage,
            special_token_ids=tokenizer.special_ids,
            shows_special_tokens=body.skip_special_tokens is False,
        )
        return Submission(response_id, prompts, renderer, num_choices=best_of)

    return await respond(request, context, prepare, stream=body.stream, names={})


def _echo(prompt: PreparedPrompt, token_bytes: Sequence[bytes]) -> EchoedPrompt | None:
    if not isinstance(prompt.source, TextPrompt):
        return None
    first = token_bytes[prompt.token_ids[0]]
    return EchoedPrompt(prompt.source.text, prompt.token_ids, first)
