"""From a request's sampling fields to the engine's parameters."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TypeVar

from engine.config import LimitsConfig
from engine.request import SEED_MASK, RequestError, SamplingParams
from server.schemas.sampling import SamplingFields

T = TypeVar("T")

GREEDY_BELOW = 1e-5
"""Lower temperatures are greedy in all but name, and would overflow float32 logits."""


@dataclass(frozen=True, slots=True)
class SamplingRules:
    """What the server and the loaded model allow a request."""

    limits: LimitsConfig
    vocab_size: int


def sampling_params(
    fields: SamplingFields,
    rules: SamplingRules,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """Parameters of a request's first choice. Without a seed each call draws a fresh one.

    Raises:
        RequestError: a value breaks one of the rules; the error names the field and the limit.
    """
    stop = _stop_texts(fields)
    stop_token_ids = frozenset(fields.stop_token_ids or ())
    _at_most(len(stop), rules.limits.max_stops, "stop", "entries")
    if stop_token_ids and max(stop_token_ids) >= rules.vocab_size:
        raise RequestError(
            f"'stop_token_ids' must lie between 0 and {rules.vocab_size - 1}.",
            param="stop_token_ids",
        )
    min_tokens = _or_default(fields.min_tokens, 0)
    if min_tokens > max_tokens:
        raise RequestError(
            f"'min_tokens' ({min_tokens}) must not exceed the maximum of {max_tokens} tokens.",
            param="min_tokens",
        )
    temperature = _or_default(fields.temperature, 1.0)
    return SamplingParams(
        max_tokens=max_tokens,
        seed=secrets.randbits(63) if fields.seed is None else fields.seed & SEED_MASK,
        temperature=temperature if temperature >= GREEDY_BELOW else 0.0,
        top_k=max(0, _or_default(fields.top_k, 0)),
        top_p=_or_default(fields.top_p, 1.0),
        min_p=_or_default(fields.min_p, 0.0),
        presence_penalty=_or_default(fields.presence_penalty, 0.0),
        frequency_penalty=_or_default(fields.frequency_penalty, 0.0),
        repetition_penalty=_or_default(fields.repetition_penalty, 1.0),
        logit_bias=fields.logit_bias or {},
        min_tokens=min_tokens,
        stop=stop,
        stop_token_ids=stop_token_ids,
        ignore_eos=_or_default(fields.ignore_eos, False),
        include_stop_str_in_output=_or_default(fields.include_stop_str_in_output, False),
        skip_special_tokens=_or_default(fields.skip_special_tokens, True),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def num_choices(fields: SamplingFields, limits: LimitsConfig) -> int:
    n = _or_default(fields.n, 1)
    _at_most(n, limits.max_choices, "n", "choices")
    return n


def check_logprobs(count: int, limits: LimitsConfig, param: str) -> None:
    _at_most(count, limits.max_logprobs, param, "alternatives")


def include_usage(fields: SamplingFields) -> bool:
    """Whether a stream ends with a usage chunk."""
    options = fields.stream_options
    if options is None:
        return False
    if not fields.stream:
        raise RequestError(
            "'stream_options' is only allowed when 'stream' is true.", param="stream_options"
        )
    return bool(options.include_usage)


def _stop_texts(fields: SamplingFields) -> tuple[str, ...]:
    if isinstance(fields.stop, str):
        return (fields.stop,)
    return tuple(fields.stop or ())


def _at_most(value: int, limit: int, param: str, unit: str) -> None:
    if value > limit:
        raise RequestError(f"'{param}' asks for {value} {unit}; the limit is {limit}.", param=param)


def _or_default(value: T | None, default: T) -> T:
    return default if value is None else value
