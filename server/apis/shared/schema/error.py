"""Bodies of errors, in OpenAI's shape and in Anthropic's."""

from __future__ import annotations

from server.apis.shared.schema.base import NamedEvent, ResponseModel


class ErrorDetail(ResponseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(ResponseModel):
    error: ErrorDetail


class AnthropicErrorDetail(ResponseModel):
    type: str
    message: str


class AnthropicError(NamedEvent):
    error: AnthropicErrorDetail
