"""What the OpenAPI document says about the answers of an endpoint."""

from __future__ import annotations

from typing import Any

from server.apis.shared.schema.common import ErrorBody, ResponseModel

Answers = dict[int | str, dict[str, Any]]


def whole_or_streamed(
    answer: type[ResponseModel], error: type[ResponseModel] = ErrorBody
) -> Answers:
    """A JSON body or, when the client asks for it, server-sent events."""
    events: dict[str, Any] = {"text/event-stream": {}}
    return {200: {"model": answer, "content": events}, "4XX": {"model": error}}
