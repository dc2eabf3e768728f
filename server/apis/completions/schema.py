"""Requests and responses of /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, FailFast, Field, Tag
from typing_extensions import TypeAliasType

from server.apis.shared.schema.base import ResponseModel
from server.apis.shared.schema.sampling import SamplingFields, TokenIds
from server.apis.shared.schema.usage import CompletionUsage

PromptTexts = TypeAliasType("PromptTexts", Annotated[list[str], FailFast()])
PromptIdLists = TypeAliasType("PromptIdLists", Annotated[list[TokenIds], FailFast()])


def _prompt_kind(value: Any) -> str | None:
    if isinstance(value, str):
        return "<text>"
    if not isinstance(value, list):
        return None
    first = value[0] if value else None
    if isinstance(first, list):
        return "<id lists>"
    return "<texts>" if isinstance(first, str) else "<ids>"


Prompt = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[PromptTexts, Tag("<texts>")]
    | Annotated[TokenIds, Tag("<ids>")]
    | Annotated[PromptIdLists, Tag("<id lists>")],
    Discriminator(
        _prompt_kind,
        custom_error_type="prompt_type",
        custom_error_message=(
            "Input should be a string, a list of strings, a list of token ids "
            "or a list of lists of token ids"
        ),
    ),
]


class CompletionRequest(SamplingFields):
    prompt: Prompt
    max_tokens: int | None = Field(None, ge=0)
    logprobs: int | None = Field(None, ge=0)
    echo: bool | None = None
    best_of: int | None = Field(None, ge=1)
    suffix: str | None = None


class CompletionLogprobs(ResponseModel):
    """Parallel lists, one entry a token; null where a prompt's first token has no probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(ResponseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: str | int | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class Completion(ResponseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: CompletionUsage | None = None
