"""What the OpenAPI document says about the answers of an endpoint."""

from __future__ import annotations

from typing import Any

from server.apis.shared.schema.base import ResponseModel
from server.apis.shared.schema.error import ErrorBody

Answers = dict[int | str, dict[str, Any]]


def whole(answer: type[ResponseModel], error: type[ResponseModel] = ErrorBody) -> Answers:
    """A JSON body."""
    return {200: {"model": answer}, "4XX": {"model": error}}


def whole_or_streamed(
    answer: type[ResponseModel], error: type[ResponseModel] = ErrorBody
) -> Answers:
    """A JSON body or, when the client asks for it, server-sent events."""
    answers = whole(answer, error)
    answers[200]["content"] = {"text/event-stream": {}}
    return answers
