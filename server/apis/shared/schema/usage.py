"""Token counts as OpenAI's older APIs tell them."""

from __future__ import annotations

from server.apis.shared.schema.base import ResponseModel


class PromptTokensDetails(ResponseModel):
    cached_tokens: int


class CompletionTokensDetails(ResponseModel):
    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class DrafterUsage(ResponseModel):
    drafted_tokens: int
    accepted_tokens: int


class SpeculationUsage(ResponseModel):
    """What speculation did for a request that asked for `speculation.stats`."""

    target_passes: int
    drafted_tokens: int
    accepted_tokens: int
    by_drafter: dict[str, DrafterUsage]


class CompletionUsage(ResponseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails
    speculation: SpeculationUsage | None = None
