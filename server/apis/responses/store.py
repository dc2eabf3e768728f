"""Responses kept in memory, so that later requests can refer to them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pydantic_core
from cachetools import LRUCache

MAX_RESPONSES = 1000
MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class StoredResponse:
    body: bytes
    """The response as it was sent, in JSON."""
    messages: tuple[dict[str, Any], ...]
    """The conversation up to and with the answer, without instructions."""
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        size = len(self.body) + len(pydantic_core.to_json(self.messages))
        object.__setattr__(self, "num_bytes", size)


class ResponseStore:
    """Bounded in number and size; the response that was used least recently goes first.

    A response belongs to the client that made it: to others it is not there.
    """

    def __init__(self, *, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._responses = LRUCache[tuple[str, str], StoredResponse](
            max_bytes, lambda stored: stored.num_bytes
        )

    def __len__(self) -> int:
        return len(self._responses)

    @property
    def num_bytes(self) -> int:
        return int(self._responses.currsize)

    def get(self, client: str, response_id: str) -> StoredResponse | None:
        return self._responses.get((client, response_id))

    def put(self, client: str, response_id: str, stored: StoredResponse) -> None:
        """Keep a response, in place of its earlier self; one over the whole size is not kept."""
        self.delete(client, response_id)
        if stored.num_bytes > self._responses.maxsize:
            return
        while len(self._responses) >= self._max_responses:
            self._responses.popitem()
        self._responses[client, response_id] = stored

    def delete(self, client: str, response_id: str) -> bool:
        """Whether there was such a response."""
        return self._responses.pop((client, response_id), None) is not None
