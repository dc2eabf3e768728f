"""POST /v1/completions."""

from __future__ import annotations

import uuid
from typing import cast

from fastapi import APIRouter, Request, Response

from engine.request import RequestError, TextPrompt
from engine.serving.async_engine import AsyncEngine
from server.apis.completions.best_of import BestOf
from server.apis.completions.render import CompletionRenderer, EchoedPrompt
from server.apis.completions.schema import Completion, CompletionRequest
from server.apis.shared.generation import Generation, PreparedPrompt
from server.apis.shared.json_route import JsonRoute
from server.apis.shared.openapi import whole_or_streamed
from server.apis.shared.prompt.sampling import (
    check_logprobs,
    num_choices,
    priority,
    sampling_params,
    usage_report,
)
from server.apis.shared.prompt.speculation import prediction_text, speculation_params
from server.apis.shared.prompt.structured import prepare_grammar
from server.apis.shared.prompt.unsupported import (
    UNSUPPORTED_COMPLETION,
    refuse_unsupported,
)
from server.apis.shared.respond import answer
from server.context import Context, ServerContext
from server.middleware.disconnect import run_until_disconnect

DEFAULT_MAX_TOKENS = 16

router = APIRouter(route_class=JsonRoute, tags=["OpenAI"])
responses = whole_or_streamed(Completion)


@router.post("/v1/completions", summary="Continue a text", response_model=None, responses=responses)
async def create_completion(
    body: CompletionRequest, request: Request, context: Context
) -> Response:
    return await run_until_disconnect(request.receive, _complete(body, context))


async def _complete(body: CompletionRequest, context: ServerContext) -> Response:
    context.require_model(body.model)
    _check(body, context)
    n = num_choices(body, context.config.limits)
    num_candidates = _num_candidates(body, n, context)
    usage = usage_report(body)
    prompts = [await _prepare(prompt, body, context) for prompt in _prompts(body, context)]
    response_id = f"cmpl-{uuid.uuid4().hex}"
    candidates = [prompt for prompt in prompts for _ in range(num_candidates)]
    renderer = CompletionRenderer(
        context.response_head(response_id, body.model),
        echoes=[_echo(prompt, body, context) for prompt in candidates],
        prompt_token_ids=[prompt.token_ids for prompt in candidates]
        if body.return_token_ids
        else None,
        best_of=BestOf(num_candidates=num_candidates, num_choices=n)
        if num_candidates > n
        else None,
        with_logprobs=body.logprobs is not None,
        usage=usage,
        special_token_ids=context.engine.tokenizer.special_ids,
        shows_special_tokens=body.skip_special_tokens is False,
    )
    generation = Generation.submit(
        context.engine,
        prompts,
        num_choices=num_candidates,
        response_id=response_id,
        ticket=context.ticket,
    )
    return await answer(generation, renderer, stream=bool(body.stream))


def _check(body: CompletionRequest, context: ServerContext) -> None:
    refuse_unsupported(body.model_extra, UNSUPPORTED_COMPLETION)
    if body.logprobs is not None:
        check_logprobs(body.logprobs, context.config.limits, "logprobs")
    if body.max_tokens == 0 and not body.echo:
        raise RequestError("'max_tokens' may be 0 only with 'echo'.", param="max_tokens")


def _num_candidates(body: CompletionRequest, n: int, context: ServerContext) -> int:
    """Sequences to generate for each prompt, of which the best n are answered."""
    best_of = n if body.best_of is None else body.best_of
    limit = context.config.limits.max_choices
    if not n <= best_of <= limit:
        raise RequestError(
            f"'best_of' must lie between 'n' ({n}) and {limit}, not be {best_of}.", param="best_of"
        )
    if best_of > n and body.stream:
        raise RequestError("With 'stream', 'best_of' must equal 'n'.", param="best_of")
    return best_of


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
    if body.suffix:
        text, token_ids = await _infill(prompt, body, engine)
    elif isinstance(prompt, str):
        text, token_ids = prompt, await engine.encode(prompt)
    else:
        num_known = min(engine.limits.vocab_size, len(engine.tokenizer.token_bytes))
        if max(prompt) >= num_known:
            raise RequestError(
                f"Prompt token ids must lie between 0 and {num_known - 1}.", param="prompt"
            )
        text, token_ids = await engine.decode(prompt), prompt
    max_tokens = body.max_tokens
    if max_tokens is None:
        max_tokens = max(1, min(DEFAULT_MAX_TOKENS, engine.limits.max_context - len(token_ids)))
    ranks = (body.best_of or 1) > (body.n or 1)
    params = sampling_params(
        body,
        context.sampling_rules,
        max_tokens=max_tokens,
        logprobs=0 if ranks and body.logprobs is None else body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )
    return await PreparedPrompt.make(
        engine,
        tuple(token_ids),
        TextPrompt(text),
        params,
        speculation=speculation_params(body, engine.drafters),
        prediction=prediction_text(body, engine.limits.max_context),
        grammar=await prepare_grammar(body, context),
        priority=priority(body, context.config.admission),
        cache_scope=context.cache_scope(body.cache_salt),
    )


async def _infill(
    prompt: str | list[int], body: CompletionRequest, engine: AsyncEngine
) -> tuple[str, list[int]]:
    """What a draft model continues, and the prompt's token ids."""
    if not isinstance(prompt, str):
        raise RequestError("'suffix' needs a prompt given as text.", param="suffix")
    if body.echo:
        raise RequestError("'echo' can't be combined with 'suffix'.", param="echo")
    return prompt, await engine.encode_infill(prompt, body.suffix or "")


def _echo(
    prompt: PreparedPrompt, body: CompletionRequest, context: ServerContext
) -> EchoedPrompt | None:
    if not body.echo or not isinstance(prompt.source, TextPrompt):
        return None
    first_piece = context.engine.tokenizer.token_bytes[prompt.token_ids[0]]
    return EchoedPrompt(prompt.source.text, prompt.token_ids, first_piece)
