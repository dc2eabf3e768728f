"""The steps from engine outputs to one API family's responses, streamed or whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from engine.request import RequestOutput, Usage
from server.apis.shared.schema.base import ResponseModel
from server.errors import ApiError

Update = TypeVar("Update")


class Renderer(Protocol[Update]):
    """A stream sends each update as chunks, a whole response joins them: so both say the same."""

    ends_with_done: bool
    """Whether a stream ends with `data: [DONE]`."""

    def take(self, index: int, output: RequestOutput) -> Update:
        """What one output adds to choice `index`; call it once an output, in order."""

    def opening(self, usage: Usage) -> Iterable[ResponseModel]:
        """What a stream sends before the first update."""

    def chunks(self, update: Update, usage: Usage) -> Iterable[ResponseModel]:
        """The stream chunks of an update; none when there is nothing to tell yet.

        `usage` counts the tokens so far.
        """

    def closing(self, usage: Usage) -> Iterable[ResponseModel]:
        """What a stream sends behind the last update."""

    def failure(self, error: ApiError) -> Iterable[ResponseModel]:
        """What a stream that can't go on sends before it ends."""

    def response(self, updates: Sequence[Update], usage: Usage) -> ResponseModel:
        """The whole response, from all the updates in order."""
