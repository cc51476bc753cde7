"""The block pool: what it hands out is distinct, and its checks notice what they are there to notice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llmc.runtime.block_pool import BlockPool, blocks_for


@given(st.lists(st.integers(-5, 5), max_size=60), st.integers(1, 20))
def test_blocks_are_distinct_and_come_back(changes: list[int], num_blocks: int) -> None:
    pool = BlockPool(num_blocks)
    held: list[int] = []
    most = 0
    for change in changes:
        if change > 0 and change <= pool.num_free:
            held += pool.allocate(change)
        elif change < 0:
            pool.release(held[change:])
            del held[change:]
        most = max(most, len(held))
        pool.check([held])
        assert all(0 <= block < most for block in held), "a fresh block was used while a freed one was there"
        assert pool.num_free == num_blocks - len(held)


def test_misuse_is_noticed() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    with pytest.raises(AssertionError, match="asked for 2 blocks, but 1 of 4 are free"):
        pool.allocate(2)
    with pytest.raises(AssertionError, match="list 2 blocks, but only 1 distinct"):
        pool.check([[blocks[0]], [blocks[0]]])
    with pytest.raises(AssertionError, match=r"block tables list \[0\], but the pool holds \[0, 1, 2\]"):
        pool.check([blocks[:1]])
    pool.release(blocks[:1])
    with pytest.raises(AssertionError, match="block 0 was released, but it is not held"):
        pool.release(blocks[:1])


def test_blocks_for() -> None:
    assert [blocks_for(n) for n in (0, 1, 16, 17, 32)] == [0, 1, 1, 2, 2]
