"""Text given as a string or as a list of parts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, FailFast, Field, Tag
from pydantic_core import PydanticCustomError
from typing_extensions import TypeAliasType

from server.apis.shared.schema.base import RequestModel
from server.apis.shared.schema.union import by_json_type

_MEDIA = {
    "image": "images",
    "image_url": "images",
    "input_image": "images",
    "audio": "audio",
    "input_audio": "audio",
    "video": "videos",
    "video_url": "videos",
    "document": "documents",
    "file": "files",
    "input_file": "files",
}
"""What a part holds by its type, in any API, where it is no text."""


def refuse_media(part: Any) -> Any:
    """To be run before a part is validated: tells what the matter is, not which types there are."""
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind in _MEDIA:
        raise PydanticCustomError(
            "media", "this model takes no {media}, only text", {"media": _MEDIA[kind]}
        )
    return part


def refusal_as_text(part: Any) -> Any:
    """A refusal in the history is text that the assistant has written."""
    if isinstance(part, dict) and part.get("type") == "refusal" and "refusal" in part:
        return {"type": "text", "text": part["refusal"]}
    return refuse_media(part)


class TextPart(RequestModel):
    type: Literal["text"]
    text: str


TextParts = TypeAliasType(
    "TextParts",
    Annotated[
        list[Annotated[TextPart, BeforeValidator(refusal_as_text)]],
        FailFast(),
        Field(min_length=1),
    ],
)


TextContent = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[TextParts, Tag("<parts>")],
    by_json_type(
        {str: "<text>", list: "<parts>"},
        error_type="content_type",
        message="Input should be a string or a list of text parts",
    ),
]
