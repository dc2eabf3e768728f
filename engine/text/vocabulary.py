"""The bytes behind every token id of a tokenizer."""

from __future__ import annotations

import json
import re
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class UnsupportedTokenizerError(ValueError):
    """The tokenizer's pieces can't be turned into bytes; the message says why."""


def token_bytes_of(tokenizer_json: str) -> list[bytes]:
    """Bytes of each token id, from a `tokenizers` serialisation.

    Byte-level BPE pieces are mapped back to bytes; in the SentencePiece style ``▁`` is a space and
    ``<0x0A>`` a byte. Added tokens stand for their content. Ids without a token are empty.

    Raises:
        UnsupportedTokenizerError: neither style fits the tokenizer's decoder.
    """
    spec: dict[str, Any] = json.loads(tokenizer_json)
    to_bytes = _byte_level_piece if _is_byte_level(spec) else _sentencepiece_piece
    if not _is_byte_level(spec) and not _is_sentencepiece(spec):
        kind = (spec.get("decoder") or {}).get("type")
        raise UnsupportedTokenizerError(f"tokenizer with decoder {kind!r} has no byte-exact pieces")
    vocabulary = _vocabulary(spec["model"])
    added = {token["id"]: token["content"] for token in spec.get("added_tokens", ())}
    pieces = [b""] * (1 + max([*vocabulary.values(), *added]))
    for piece, token_id in vocabulary.items():
        if token_id not in added:
            pieces[token_id] = to_bytes(piece)
    for token_id, content in added.items():
        pieces[token_id] = content.encode()
    return pieces


def _vocabulary(model: dict[str, Any]) -> dict[str, int]:
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        return vocabulary
    return {piece: token_id for token_id, (piece, _) in enumerate(vocabulary)}


def _parts(spec: dict[str, Any], section: str) -> list[dict[str, Any]]:
    part = spec.get(section)
    if part is None:
        return []
    for members in ("decoders", "pretokenizers", "normalizers"):
        if members in part:
            return list(part[members])
    return [part]


def _is_byte_level(spec: dict[str, Any]) -> bool:
    return any(part["type"] == "ByteLevel" for part in _parts(spec, "decoder"))


def _is_sentencepiece(spec: dict[str, Any]) -> bool:
    return any(
        part["type"] == "Metaspace" or (part["type"] == "Replace" and part.get("content") == " ")
        for part in _parts(spec, "decoder")
    )


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte, inverted."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


_BYTE_OF = _byte_level_alphabet()


def _byte_level_piece(piece: str) -> bytes:
    if all(character in _BYTE_OF for character in piece):
        return bytes(_BYTE_OF[character] for character in piece)
    return piece.encode()


def _sentencepiece_piece(piece: str) -> bytes:
    byte_token = _BYTE_TOKEN.fullmatch(piece)
    if byte_token:
        return bytes([int(byte_token[1], 16)])
    return piece.replace("\u2581", " ").encode()
