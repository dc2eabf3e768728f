"""Incremental detokenization that never emits half a character."""

from __future__ import annotations

import codecs
from collections.abc import Container, Sequence


class IncrementalDetokenizer:
    """Turns a stream of token ids into text, one token at a time, in constant time each.

    Bytes of an unfinished character are held back until it is whole; bytes that can't become a
    character turn into U+FFFD.
    """

    def __init__(self, token_bytes: Sequence[bytes], hidden: Container[int] = frozenset()) -> None:
        """
        Args:
            token_bytes: bytes by token id.
            hidden: token ids that leave no text (special tokens).
        """
        self._token_bytes = token_bytes
        self._hidden = hidden
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Text that the token completes."""
        if token_id in self._hidden or token_id >= len(self._token_bytes):
            return ""
        return self._decoder.decode(self._token_bytes[token_id])

    def finish(self) -> str:
        """Whatever is still held back, as U+FFFD."""
        return self._decoder.decode(b"", final=True)
