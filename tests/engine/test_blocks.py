from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from engine.scheduling.blocks import BlockPool, extend_block_hashes

BLOCK_SIZE = 4


def chain(tokens: list[int], count: int | None = None) -> list[bytes]:
    hashes: list[bytes] = []
    extend_block_hashes(hashes, tokens, BLOCK_SIZE, len(tokens) if count is None else count)
    return hashes


def test_digest_depends_on_everything_before() -> None:
    first, second = chain([1, 2, 3, 4, 5, 6, 7, 8]), chain([9, 2, 3, 4, 5, 6, 7, 8])
    assert first[1] != second[1]
    assert chain([1, 2, 3, 4, 5, 6, 7]) == first[:1]


def test_chain_extends_without_rehashing() -> None:
    hashes = chain([1, 2, 3, 4])
    known = list(hashes)
    extend_block_hashes(hashes, [1, 2, 3, 4, 5, 6, 7, 8], BLOCK_SIZE, 8)
    assert hashes[:1] == known
    assert hashes == chain([1, 2, 3, 4, 5, 6, 7, 8])


def test_allocate_refuses_without_side_effects() -> None:
    pool = BlockPool(3, BLOCK_SIZE)
    assert pool.allocate(4) is None
    assert pool.num_free == 3


def test_double_release_is_an_error() -> None:
    pool = BlockPool(3, BLOCK_SIZE)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.release(blocks)
    with pytest.raises(RuntimeError, match="released more often"):
        pool.release(blocks)


def test_released_prefix_is_found_again_and_shared() -> None:
    pool = BlockPool(4, BLOCK_SIZE)
    digests = chain(list(range(8)))
    blocks = pool.allocate(2)
    assert blocks is not None
    for block, digest in zip(blocks, digests, strict=True):
        pool.publish(block, digest)
    assert pool.match_prefix(digests) == blocks
    pool.release(blocks)
    pool.release(blocks)
    assert pool.num_free == 4
    assert pool.match_prefix(digests) == blocks


def test_blank_blocks_are_used_before_cached_ones_and_tails_before_heads() -> None:
    pool = BlockPool(3, BLOCK_SIZE)
    digests = chain(list(range(8)))
    blocks = pool.allocate(2)
    assert blocks is not None
    for block, digest in zip(blocks, digests, strict=True):
        pool.publish(block, digest)
    pool.release(blocks)
    assert pool.allocate(1) not in ([blocks[0]], [blocks[1]])
    assert pool.allocate(1) == [blocks[1]]
    assert pool.match_prefix(digests) == [blocks[0]]


def test_without_prefix_cache_nothing_is_found() -> None:
    pool = BlockPool(2, BLOCK_SIZE, prefix_cache=False)
    digests = chain([1, 2, 3, 4])
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.publish(blocks[0], digests[0])
    assert pool.match_prefix(digests) == []


class BlockPoolMachine(RuleBasedStateMachine):
    """Against a model: who holds what, and what each digest's block contains."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(8, BLOCK_SIZE)
        self.references: dict[int, int] = {}

    def _hold(self, blocks: list[int]) -> None:
        for block in blocks:
            self.references[block] = self.references.get(block, 0) + 1

    @rule(target=held, prompt=st.lists(st.integers(0, 1), max_size=20))
    def admit(self, prompt: list[int]) -> list[int]:
        digests = chain(prompt)
        matched = self.pool.match_prefix(digests)
        self._hold(matched)
        free_before = self.pool.num_free
        fresh = self.pool.allocate(len(digests) - len(matched))
        if fresh is None:
            assert len(digests) - len(matched) > free_before
            return matched
        assert not any(block in self.references for block in fresh)
        self._hold(fresh)
        for block, digest in zip(matched + fresh, digests, strict=True):
            self.pool.publish(block, digest)
        return matched + fresh

    @rule(blocks=consumes(held))
    def release(self, blocks: list[int]) -> None:
        self.pool.release(blocks)
        for block in blocks:
            self.references[block] -= 1
            if not self.references[block]:
                del self.references[block]

    @invariant()
    def accounts_add_up(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_free + len(self.references) == self.pool.num_blocks


TestBlockPoolMachine = BlockPoolMachine.TestCase
TestBlockPoolMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
