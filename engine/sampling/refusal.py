"""Why a grammar can't be used. Loads no native code."""

from __future__ import annotations

from engine.request import RequestError


def refusal(reason: str) -> RequestError:
    return RequestError(f"The output grammar can't be used: {reason}.", param="grammar")
