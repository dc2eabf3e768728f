"""A model's vocabulary as llguidance wants it."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from llguidance import LLTokenizer, TokenizerWrapper

_SPECIAL_MARK = b"\xff"
"""In front of a token's bytes: it is a control token and stands for no text."""


class GrammarTokenizer(Protocol):
    """What grammars need of a tokenizer; see `engine.text.tokenizer.TextTokenizer`."""

    @property
    def token_bytes(self) -> Sequence[bytes]: ...

    @property
    def special_ids(self) -> Collection[int]: ...

    @property
    def eos_ids(self) -> Collection[int]: ...

    def encode_continuation(self, text: str) -> list[int] | None: ...


@dataclass(frozen=True, slots=True)
class TokenTable:
    """A vocabulary without its tokenizer: enough to compile grammars, but not to force text."""

    token_bytes: tuple[bytes, ...]
    special_ids: frozenset[int]
    eos_ids: frozenset[int]
    vocab_size: int

    def encode_continuation(self, text: str) -> list[int] | None:
        return None

    def index(self) -> LLTokenizer:
        """The vocabulary as a prefix tree; takes up to seconds."""
        return GrammarVocabulary(self, self.vocab_size).index()


class GrammarVocabulary:
    """Token bytes and end tokens of a model, and how it splits text that a grammar forces."""

    def __init__(self, tokenizer: GrammarTokenizer, vocab_size: int) -> None:
        """
        Args:
            tokenizer: the target's; it must have an end token.
            vocab_size: width of its logits; ids that no token has are never allowed.
        """
        self._tokenizer = tokenizer
        self.eos_token_id = min(tokenizer.eos_ids)
        self.bos_token_id = None
        self.special_token_ids = sorted(tokenizer.special_ids)
        self.tokens = [
            _SPECIAL_MARK + piece if token_id in tokenizer.special_ids else piece
            for token_id, piece in enumerate(tokenizer.token_bytes)
        ]
        self.tokens += [b""] * (vocab_size - len(self.tokens))

    def __call__(self, text: bytes) -> list[int]:
        """Tokens of text that follows other text."""
        ids = self._tokenizer.encode_continuation(text.decode())
        return self._longest_pieces(text) if ids is None else ids

    def index(self) -> LLTokenizer:
        """The vocabulary as a prefix tree; takes up to seconds."""
        return LLTokenizer(TokenizerWrapper(self), eos_token=sorted(self._tokenizer.eos_ids))

    def _longest_pieces(self, text: bytes) -> list[int]:
        """A tokenization without the tokenizer, for text that it does not keep byte for byte."""
        ids: list[int] = []
        start = 0
        while start < len(text):
            ends = range(min(len(text), start + self._longest), start, -1)
            piece = next(text[start:end] for end in ends if text[start:end] in self._id_of)
            ids.append(self._id_of[piece])
            start += len(piece)
        return ids

    @functools.cached_property
    def _id_of(self) -> dict[bytes, int]:
        special = self._tokenizer.special_ids
        token_bytes = enumerate(self._tokenizer.token_bytes)
        return {piece: i for i, piece in token_bytes if piece and i not in special}

    @functools.cached_property
    def _longest(self) -> int:
        return max(map(len, self._id_of))
