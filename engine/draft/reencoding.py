"""Carrying text between two tokenizers, byte-exact at the boundary.

The draft model follows the target's text in its own tokens, and its continuation is cut into the
target's tokens. Both directions re-encode a short window of text around the boundary, because a
tokenizer may merge across it. (String-level "universal assisted generation": Timor et al.,
"Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous
Vocabularies", arXiv 2502.05202.)
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.text.tokenizer import TextTokenizer

_WINDOW_TOKENS = 6


def split_whole_characters(data: bytes) -> tuple[bytes, bytes]:
    """Split off an unfinished UTF-8 character at the end."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte < 0x80:
            return data, b""
        if byte >= 0xC0:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return (data, b"") if length <= back else (data[:-back], data[-back:])
    return data, b""


def window_start(token_ids: Sequence[int], tokenizer: TextTokenizer, floor: int) -> int:
    """Index of a token near the end at which re-encoding can begin.

    The window holds no control token and no padding id, begins with a whole character and not
    before `floor`.
    """
    start = len(token_ids)
    for index in range(len(token_ids) - 1, floor - 1, -1):
        token_id = token_ids[index]
        if token_id in tokenizer.special_ids or token_id >= len(tokenizer.token_bytes):
            break
        piece = tokenizer.token_bytes[token_id]
        begins_character = bool(piece) and not 0x80 <= piece[0] < 0xC0
        if begins_character:
            start = index
            if len(token_ids) - index >= _WINDOW_TOKENS:
                break
    return start


def encode_behind(
    context_ids: Sequence[int], data: bytes, tokenizer: TextTokenizer, floor: int = 0
) -> tuple[int, list[int]] | None:
    """Encode text that follows tokens of the same tokenizer, letting it merge with the last ones.

    Args:
        context_ids: what the text follows.
        data: the text, whole UTF-8 characters.
        floor: index of the first context token that may be replaced.

    Returns:
        (start, ids): context_ids[:start] + ids is the new token list; or None when the text can't
        be encoded byte for byte.
    """
    start = window_start(context_ids, tokenizer, floor)
    window = tokenizer.bytes_of(context_ids[start:])
    ids = _encode(window + data, tokenizer)
    if ids is not None:
        return start, ids
    ids = _encode(data, tokenizer)
    return None if ids is None else (len(context_ids), ids)


def continuation_of(context_ids: Sequence[int], data: bytes, tokenizer: TextTokenizer) -> list[int]:
    """The tokens of `data` behind a fixed context.

    Args:
        context_ids: tokens that stay as they are.
        data: bytes that follow them; an unfinished character at the end is left out.

    Returns:
        Token ids that begin exactly where the context ends; empty when the tokenizer would rather
        merge across that point, or the bytes are no text.
    """
    start = window_start(context_ids, tokenizer, 0)
    window = tokenizer.bytes_of(context_ids[start:])
    whole, _ = split_whole_characters(window + data)
    ids = _encode(whole, tokenizer)
    if ids is None:
        return []
    index = tokenizer.index_at_byte(ids, len(window))
    return [] if index < 0 else ids[index:]


def _encode(data: bytes, tokenizer: TextTokenizer) -> list[int] | None:
    try:
        return tokenizer.encode_continuation(data.decode())
    except UnicodeDecodeError:
        return None
