"""How single tokens and their log-probabilities appear in JSON."""

from __future__ import annotations

from typing import Literal

from engine.request import FinishReason, RequestOutput

MIN_LOGPROB = -9999.0
"""Stands for -inf, which JSON can't hold."""


def token_text(token_bytes: bytes) -> str:
    """A token as text; bytes that are no UTF-8 on their own appear as `bytes:` escapes."""
    try:
        return token_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + token_bytes.decode(errors="backslashreplace")


def json_logprob(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)


def num_characters(token_bytes: bytes) -> int:
    """Characters that begin in a token's bytes."""
    return sum(byte & 0xC0 != 0x80 for byte in token_bytes)


def api_finish_reason(output: RequestOutput) -> Literal["stop", "length"] | None:
    match output.finish_reason:
        case None:
            return None
        case FinishReason.STOP:
            return "stop"
        case FinishReason.LENGTH:
            return "length"
    raise ValueError(f"{output.finish_reason} is no regular end of a choice")
