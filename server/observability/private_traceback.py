"""What of an exception may stand in a log that must not hold what clients wrote."""

from __future__ import annotations

import traceback
from collections.abc import Iterator


def private_traceback(error: BaseException) -> str:
    """Types and places of an exception and its causes, without messages: those may quote input."""
    return "\n".join(line for link in _chain(error) for line in _lines(link))


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or (
            None if current.__suppress_context__ else current.__context__
        )


def _lines(error: BaseException) -> Iterator[str]:
    yield f"{type(error).__module__}.{type(error).__qualname__} raised in"
    for frame in traceback.extract_tb(error.__traceback__):
        yield f"  {frame.filename}:{frame.lineno} {frame.name}"
