"""From a request's sampling fields to the engine's parameters."""

from __future__ import annotations

import secrets
from typing import TypeVar

from engine.config import AdmissionConfig, LimitsConfig
from engine.request import SEED_MASK, RequestError, SamplingDefaults, SamplingParams
from server.apis.shared.schema.sampling import SamplingFields
from server.limits import at_most, check_stops

T = TypeVar("T")

GREEDY_BELOW = 1e-5
"""Lower temperatures are greedy in all but name, and would overflow float32 logits."""


def sampling_params(
    fields: SamplingFields,
    limits: LimitsConfig,
    defaults: SamplingDefaults,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """Parameters of a request's first choice. Without a seed each call draws a fresh one.

    Args:
        defaults: the loaded model's.

    Raises:
        RequestError: a value is over a limit or contradicts another; names the field and limit.
    """
    stop = _stop_texts(fields)
    check_stops(stop, limits)
    min_tokens = _or_default(fields.min_tokens, 0)
    if min_tokens > max_tokens:
        raise RequestError(
            f"'min_tokens' ({min_tokens}) must not exceed the maximum of {max_tokens} tokens.",
            param="min_tokens",
        )
    temperature = _first_given(fields.temperature, defaults.temperature, 1.0)
    return SamplingParams(
        max_tokens=max_tokens,
        seed=secrets.randbits(63) if fields.seed is None else fields.seed & SEED_MASK,
        temperature=temperature if temperature >= GREEDY_BELOW else 0.0,
        top_k=max(0, _first_given(fields.top_k, defaults.top_k, 0)),
        top_p=_first_given(fields.top_p, defaults.top_p, 1.0),
        min_p=_first_given(fields.min_p, defaults.min_p, 0.0),
        presence_penalty=_or_default(fields.presence_penalty, 0.0),
        frequency_penalty=_or_default(fields.frequency_penalty, 0.0),
        repetition_penalty=_first_given(
            fields.repetition_penalty, defaults.repetition_penalty, 1.0
        ),
        logit_bias=fields.logit_bias or {},
        min_tokens=min_tokens,
        stop=stop,
        stop_token_ids=frozenset(fields.stop_token_ids or ()),
        ignore_eos=_or_default(fields.ignore_eos, False),
        include_stop_str_in_output=_or_default(fields.include_stop_str_in_output, False),
        skip_special_tokens=_or_default(fields.skip_special_tokens, True),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def num_choices(fields: SamplingFields, limits: LimitsConfig) -> int:
    n = _or_default(fields.n, 1)
    at_most(n, limits.max_choices, "n", "choices")
    return n


def check_logprobs(count: int, limits: LimitsConfig, param: str) -> None:
    at_most(count, limits.max_logprobs, param, "alternatives")


def priority(fields: SamplingFields, admission: AdmissionConfig) -> int:
    value = _or_default(fields.priority, 0)
    if value < admission.min_priority:
        raise RequestError(
            f"'priority' is {value}; the limit is {admission.min_priority} or more.",
            param="priority",
        )
    return value


def _stop_texts(fields: SamplingFields) -> tuple[str, ...]:
    if isinstance(fields.stop, str):
        return (fields.stop,)
    return tuple(fields.stop or ())


def _first_given(value: T | None, advised: T | None, default: T) -> T:
    if value is not None:
        return value
    return default if advised is None else advised


def _or_default(value: T | None, default: T) -> T:
    return default if value is None else value
