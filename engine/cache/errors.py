"""What goes wrong with the cache, in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class CacheError(ValueError):
    """The cache can't be used as it should; the message is one readable line."""


@contextmanager
def writing_to_cache(root: Path) -> Iterator[None]:
    """Tell in one line what goes wrong with the disk of the cache meanwhile.

    Raises:
        CacheError: the disk is full, or the cache may not be written.
        OSError: it names a file that lies elsewhere.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error.filename, str) and not Path(error.filename).is_relative_to(root):
            raise
        reason = error.strerror or str(error)
        raise CacheError(
            f"can't write to the model cache in {root}: {reason}; SLIPSTREAM_CACHE can name "
            "another folder"
        ) from error
