"""From /v1/completions requests to what the engine is given."""

from __future__ import annotations

from typing import cast

from engine.config import LimitsConfig
from engine.request import RequestError, TextPrompt
from engine.serving.async_engine import AsyncEngine
from server.apis.completions.schema import CompletionRequest
from server.apis.shared.prompt.prepared_prompt import PreparedPrompt, prepare_prompt
from server.apis.shared.prompt.sampling import check_logprobs
from server.apis.shared.prompt.unsupported_fields import (
    UNSUPPORTED_COMPLETION,
    refuse_unsupported,
)
from server.context import ServerContext

DEFAULT_MAX_TOKENS = 16


def check(body: CompletionRequest, limits: LimitsConfig) -> None:
    """
    Raises:
        RequestError: fields that are not served, over a limit or contradict each other.
    """
    refuse_unsupported(body.model_extra, UNSUPPORTED_COMPLETION)
    if body.logprobs is not None:
        check_logprobs(body.logprobs, limits, "logprobs")
    if body.max_tokens == 0 and not body.echo:
        raise RequestError("'max_tokens' may be 0 only with 'echo'.", param="max_tokens")


def num_candidates(body: CompletionRequest, n: int, limits: LimitsConfig) -> int:
    """Sequences to generate for each prompt, of which the best n are answered."""
    best_of = n if body.best_of is None else body.best_of
    limit = limits.max_choices
    if not n <= best_of <= limit:
        raise RequestError(
            f"'best_of' must lie between 'n' ({n}) and {limit}, not be {best_of}.", param="best_of"
        )
    if best_of > n and body.stream:
        raise RequestError("With 'stream', 'best_of' must equal 'n'.", param="best_of")
    return best_of


async def prepare_prompts(body: CompletionRequest, context: ServerContext) -> list[PreparedPrompt]:
    """
    Raises:
        RequestError: a prompt is none, or the model can't serve it.
    """
    return [
        await _prepare(prompt, body, context) for prompt in _prompts(body, context.config.limits)
    ]


def _prompts(body: CompletionRequest, limits: LimitsConfig) -> list[str | list[int]]:
    """The request's prompts, one by one, whatever form they came in."""
    given = body.prompt
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        prompts = [given]
    else:
        prompts = cast("list[str | list[int]]", given)
    limit = limits.max_prompts
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
    return await prepare_prompt(
        context,
        body,
        tuple(token_ids),
        TextPrompt(text),
        max_tokens=max_tokens,
        logprobs=0 if ranks and body.logprobs is None else body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
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
