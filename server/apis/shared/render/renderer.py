"""The steps from engine outputs to one API family's responses, streamed or whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypedDict, TypeVar

from engine.request import RequestOutput, Usage
from server.apis.shared.schema.common import ResponseModel
from server.errors import ApiError

Piece = TypeVar("Piece")


class ResponseHead(TypedDict):
    """The fields that every chunk of a response repeats."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class Renderer(Protocol[Piece]):
    """A stream sends each piece as chunks, a whole response joins them: so both say the same."""

    ends_with_done: bool
    """Whether a stream ends with `data: [DONE]`."""

    def take(self, index: int, output: RequestOutput) -> Piece:
        """What one output adds to choice `index`; call it once an output, in order."""

    def opening(self, usage: Usage) -> Iterable[ResponseModel]:
        """What a stream sends before the first piece."""

    def chunks(self, piece: Piece, usage: Usage) -> Iterable[ResponseModel]:
        """The stream chunks of a piece; none when there is nothing to tell yet.

        `usage` counts the tokens so far.
        """

    def closing(self, usage: Usage) -> Iterable[ResponseModel]:
        """What a stream sends behind the last piece."""

    def failure(self, error: ApiError) -> Iterable[ResponseModel]:
        """What a stream that can't go on sends before it ends."""

    def response(self, pieces: Sequence[Piece], usage: Usage) -> ResponseModel:
        """The whole response, from all the pieces in order."""
