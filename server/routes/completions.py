"""POST /v1/completions."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any, cast

from fastapi import APIRouter, Request, Response

from engine.request import RequestError, TextPrompt
from server.answer import answer
from server.context import Context, ServerContext
from server.disconnect import run_until_disconnect
from server.generation import Generation, PreparedPrompt
from server.json_route import JsonRoute
from server.render.completions import CompletionRenderer, EchoedPrompt
from server.sampling import check_logprobs, num_choices, sampling_params, usage_report
from server.schemas.common import ErrorBody
from server.schemas.completions import Completion, CompletionRequest
from server.speculation import prediction_text, speculation_params
from server.unsupported import (
    UNSUPPORTED_COMPLETION,
    refuse_unsupported,
)

DEFAULT_MAX_TOKENS = 16

router = APIRouter(route_class=JsonRoute)
responses: dict[int | str, dict[str, Any]] = {
    200: {"model": Completion},
    "4XX": {"model": ErrorBody},
}


@router.post("/v1/completions", response_model=None, responses=responses)
async def create_completion(
    body: CompletionRequest, request: Request, context: Context
) -> Response:
    return await run_until_disconnect(request.receive, _complete(body, context))


async def _complete(body: CompletionRequest, context: ServerContext) -> Response:
    context.require_model(body.model)
    _check(body, context)
    n = num_choices(body, context.config.limits)
    usage = usage_report(body)
    prompts = [await _prepare(prompt, body, context) for prompt in _prompts(body, context)]
    response_id = f"cmpl-{uuid.uuid4().hex}"
    renderer = CompletionRenderer(
        context.response_head(response_id),
        echoes=[_echo(prompt, body, context) for prompt in prompts for _ in range(n)],
        with_logprobs=body.logprobs is not None,
        usage=usage,
        special_token_ids=context.engine.tokenizer.special_ids,
        shows_special_tokens=body.skip_special_tokens is False,
    )
    generation = Generation.submit(context.engine, prompts, num_choices=n, response_id=response_id)
    return await answer(generation, renderer, stream=bool(body.stream))


def _check(body: CompletionRequest, context: ServerContext) -> None:
    refuse_unsupported(body.model_extra, UNSUPPORTED_COMPLETION)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise RequestError(
            "'best_of' is not supported by this server unless it equals 'n'.",
            param="best_of",
            code="unsupported_parameter",
        )
    if body.logprobs is not None:
        check_logprobs(body.logprobs, context.config.limits, "logprobs")
    if body.max_tokens == 0 and not body.echo:
        raise RequestError("'max_tokens' may be 0 only with 'echo'.", param="max_tokens")


def _prompts(body: CompletionRequest, context: ServerContext) -> list[str | list[int]]:
    """The request's prompts, one by one, whatever form they came in."""
    given = body.prompt
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        prompts = [given]
    else:
        prompts = cast("list[str | list[int]]", given)
    limit = context.config.limits.max_prompts
    if len(prompts) > limit:
        raise RequestError(
            f"'prompt' holds {len(prompts)} prompts; the limit is {limit}.", param="prompt"
        )
    if not prompts or not all(prompts):
        raise RequestError("The prompt is empty: it must hold at least one token.", param="prompt")
    return prompts


async def _prepare(
    prompt: str | list[int], body: CompletionRequest, context: ServerContext
) -> PreparedPrompt:
    engine = context.engine
    if isinstance(prompt, str):
        text, token_ids = prompt, await engine.encode(prompt)
    else:
        num_known = min(engine.limits.vocab_size, len(engine.tokenizer.pieces))
        if max(prompt) >= num_known:
            raise RequestError(
                f"Prompt token ids must lie between 0 and {num_known - 1}.", param="prompt"
            )
        text, token_ids = await asyncio.to_thread(engine.tokenizer.decode, prompt), prompt
    max_tokens = body.max_tokens
    if max_tokens is None:
        max_tokens = max(1, min(DEFAULT_MAX_TOKENS, engine.limits.max_context - len(token_ids)))
    params = sampling_params(
        body,
        context.sampling_rules,
        max_tokens=max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )
    return PreparedPrompt(
        tuple(token_ids),
        TextPrompt(text),
        params,
        speculation=speculation_params(body, engine.drafters),
        prediction=prediction_text(body, engine.limits.max_context),
    )


def _echo(
    prompt: PreparedPrompt, body: CompletionRequest, context: ServerContext
) -> EchoedPrompt | None:
    if not body.echo or not isinstance(prompt.source, TextPrompt):
        return None
    first_piece = context.engine.tokenizer.pieces[prompt.token_ids[0]]
    return EchoedPrompt(prompt.source.text, prompt.token_ids, first_piece)
