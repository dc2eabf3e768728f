"""The steps from engine outputs to one API family's responses, streamed or whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypedDict, TypeVar

from engine.request import RequestOutput, Usage
from server.schemas.common import CompletionUsage, PromptTokensDetails, ResponseModel

Piece = TypeVar("Piece")


class ResponseHead(TypedDict):
    """The fields that every chunk of a response repeats."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class Renderer(Protocol[Piece]):
    """A stream sends each piece as chunks, a whole response joins them: so both say the same."""

    def take(self, index: int, output: RequestOutput) -> Piece:
        """What one output adds to choice `index`; call it once an output, in order."""

    def chunks(self, piece: Piece) -> Iterable[ResponseModel]:
        """The stream chunks of a piece; none when there is nothing to tell yet."""

    def usage_chunk(self, usage: Usage) -> ResponseModel | None:
        """The stream's last chunk, if the client asked for it."""

    def response(self, pieces: Sequence[Piece], usage: Usage) -> ResponseModel:
        """The whole response, from all the pieces in order."""


def api_usage(usage: Usage) -> CompletionUsage:
    return CompletionUsage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.cached_tokens),
    )
