"""BlockPool: bookkeeping of paged KV memory and the prefix cache. Knows ids, not tensors."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np


def extend_block_hashes(
    hashes: list[bytes],
    token_ids: Sequence[int],
    block_size: int,
    num_tokens: int,
    scope: str = "",
) -> None:
    """Extend a chain of block digests to cover the full blocks among the first `num_tokens`.

    A digest covers its block's tokens and, through its parent's digest, everything before them and
    the scope: equal tokens of two scopes have nothing in common.
    """
    for index in range(len(hashes), num_tokens // block_size):
        parent = hashes[index - 1] if index else _digest(scope.encode())
        tokens = np.asarray(token_ids[index * block_size : (index + 1) * block_size], np.int32)
        hashes.append(_digest(parent + tokens.tobytes()))


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


class BlockPool:
    """Reference-counted KV blocks.

    A block is held (count > 0) or free. A free block may still be cached under the digest of its
    contents; free blocks are reused uncached first, then least recently released first.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_cache: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._prefix_cache = prefix_cache
        self._references = [0] * num_blocks
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._evictable)

    @property
    def usage(self) -> float:
        """Share of blocks held, 0 to 1."""
        return 1.0 - self.num_free / self.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill, the last perhaps in part."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int] | None:
        """Hold `count` fresh blocks, or return None and change nothing."""
        if count > self.num_free:
            return None
        return [self._take_free() for _ in range(count)]

    def match_prefix(self, digests: Sequence[bytes]) -> list[int]:
        """Hold and return the cached blocks of the longest known prefix of a digest chain."""
        matched: list[int] = []
        for digest in digests:
            block = self._block_of.get(digest)
            if block is None:
                break
            matched.append(block)
        for block in matched:
            if self._references[block] == 0:
                del self._evictable[block]
            self._references[block] += 1
        return matched

    def publish(self, block: int, digest: bytes) -> None:
        """Make a held, completely computed block available to later prefix matches."""
        if self._prefix_cache and digest not in self._block_of and block not in self._digest_of:
            self._block_of[digest] = block
            self._digest_of[block] = digest

    def withdraw(self, blocks: Iterable[int]) -> None:
        """Keep held blocks, whose contents are not to be trusted, from later prefix matches."""
        for block in blocks:
            digest = self._digest_of.pop(block, None)
            if digest is not None:
                del self._block_of[digest]

    def release(self, blocks: Iterable[int]) -> None:
        """Give up one reference to each block of a request, given in the request's order.

        The tail of a prefix becomes evictable before its head.
        """
        for block in reversed(list(blocks)):
            if self._references[block] <= 0:
                raise RuntimeError(f"KV block {block} is released more often than held")
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._digest_of:
                    self._evictable[block] = None
                else:
                    self._blank.append(block)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless every block is in exactly one consistent state."""
        blank, evictable = set(self._blank), set(self._evictable)
        held = {block for block, count in enumerate(self._references) if count > 0}
        if len(blank) != len(self._blank) or blank & evictable or (blank | evictable) & held:
            raise RuntimeError("a KV block is in two states")
        if len(blank) + len(evictable) + len(held) != self.num_blocks:
            raise RuntimeError("a KV block is lost")
        if {self._block_of[digest] for digest in self._digest_of.values()} != set(self._digest_of):
            raise RuntimeError("the prefix cache's two indexes differ")
        if blank & set(self._digest_of) or not evictable <= set(self._digest_of):
            raise RuntimeError("a free KV block is filed wrongly")

    def _take_free(self) -> int:
        if self._blank:
            block = self._blank.pop()
        else:
            block, _ = self._evictable.popitem(last=False)
            del self._block_of[self._digest_of.pop(block)]
        self._references[block] = 1
        return block
