"""Responses kept in memory, so that later requests can refer to them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import pydantic_core

from server.conversation import Message

MAX_RESPONSES = 1000
MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class StoredResponse:
    body: bytes
    """The response as it was sent, in JSON."""
    messages: tuple[Message, ...]
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
        self._max_bytes = max_bytes
        self._responses: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._responses)

    def get(self, client: str, response_id: str) -> StoredResponse | None:
        stored = self._responses.get((client, response_id))
        if stored is not None:
            self._responses.move_to_end((client, response_id))
        return stored

    def put(self, client: str, response_id: str, stored: StoredResponse) -> None:
        self.delete(client, response_id)
        self._responses[client, response_id] = stored
        self.num_bytes += stored.num_bytes
        while len(self._responses) > self._max_responses or self.num_bytes > self._max_bytes:
            _, dropped = self._responses.popitem(last=False)
            self.num_bytes -= dropped.num_bytes

    def delete(self, client: str, response_id: str) -> bool:
        """Whether there was such a response."""
        stored = self._responses.pop((client, response_id), None)
        if stored is None:
            return False
        self.num_bytes -= stored.num_bytes
        return True
