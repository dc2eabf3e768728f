"""The fields that every chunk of a response repeats."""

from __future__ import annotations

import hashlib
import time
from typing import TypedDict

from server.context import ServerContext


class ResponseHead(TypedDict):
    id: str
    created: int
    model: str
    system_fingerprint: str


def response_head(context: ServerContext, response_id: str, model: str) -> ResponseHead:
    """
    Args:
        model: the name that the client has used.
    """
    identity = f"{context.engine.card.name}/{context.config.dtype}"
    digest = hashlib.blake2b(identity.encode(), digest_size=5)
    return ResponseHead(
        id=response_id,
        created=int(time.time()),
        model=model,
        system_fingerprint=f"fp_{digest.hexdigest()}",
    )
