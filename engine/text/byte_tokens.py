"""ByteTokens: a vocabulary whose every token has known bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class ByteTokens:
    """What follows from the bytes alone, however text becomes tokens.

    Attributes:
        token_bytes: bytes by token id.
        special_ids: control tokens, which stand for no text.
    """

    token_bytes: list[bytes]
    special_ids: frozenset[int]

    def bytes_of(self, ids: Iterable[int]) -> bytes:
        """The bytes of a token sequence, control tokens included."""
        return b"".join([self.token_bytes[i] for i in ids])

    def decode(self, ids: Iterable[int]) -> str:
        """The text of a token sequence without control tokens; broken characters as U+FFFD."""
        return self.bytes_of(i for i in ids if i not in self.special_ids).decode(errors="replace")

    def index_at_byte(self, ids: Sequence[int], offset: int) -> int:
        """Index of the token that starts at a byte offset, or -1."""
        position = 0
        for index, token_id in enumerate(ids):
            if position >= offset:
                return index if position == offset else -1
            position += len(self.token_bytes[token_id])
        return len(ids) if position == offset else -1
