"""Schemas that several API families share."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]


class RequestModel(BaseModel):
    """A request body: no coercion of types; unknown fields are kept aside in `model_extra`."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, protected_namespaces=())


class UnservedTool(RequestModel):
    """A tool of a type that the server lacks."""

    type: str


class ResponseModel(BaseModel):
    """A response body, serialised without the fields that were not set."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())

    def to_json(self) -> str:
        return self.model_dump_json(exclude_unset=True)


class NamedEvent(ResponseModel):
    """A server-sent event that has its type as its name."""

    type: str


class StreamOptions(RequestModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


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


class Version(ResponseModel):
    version: str


class Health(ResponseModel):
    status: str
    reason: str | None = None
    """What is wrong with the engine, in one line."""


class ErrorDetail(ResponseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(ResponseModel):
    error: ErrorDetail
