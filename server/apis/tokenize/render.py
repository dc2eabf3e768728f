"""Token ids and bytes as /tokenize and /detokenize responses."""

from __future__ import annotations

from collections.abc import Sequence

from server.apis.shared.render.tokens import token_text
from server.apis.tokenize.schema import Detokenized, Tokenized


def tokenized(
    token_ids: list[int], *, max_context: int, token_bytes: Sequence[bytes] | None
) -> Tokenized:
    """
    Args:
        token_bytes: by token id; None: the text of single tokens is not told.
    """
    return Tokenized(
        count=len(token_ids),
        max_model_len=max_context,
        tokens=token_ids,
        token_strs=None if token_bytes is None else [token_text(token_bytes[i]) for i in token_ids],
    )


def detokenized(whole: bytes) -> Detokenized:
    return Detokenized(prompt=whole.decode(errors="replace"))
