"""Text given as a string or as a list of parts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, FailFast, Field, Tag
from typing_extensions import TypeAliasType

from server.schemas.common import RequestModel


class TextPart(RequestModel):
    type: Literal["text"]
    text: str


TextParts = TypeAliasType("TextParts", Annotated[list[TextPart], FailFast(), Field(min_length=1)])


def _content_kind(value: Any) -> str | None:
    return "<text>" if isinstance(value, str) else "<parts>" if isinstance(value, list) else None


TextContent = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[TextParts, Tag("<parts>")],
    Discriminator(
        _content_kind,
        custom_error_type="content_type",
        custom_error_message="Input should be a string or a list of text parts",
    ),
]
