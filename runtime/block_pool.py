"""Hands out the blocks of the paged KV pool."""

from __future__ import annotations

from collections.abc import Iterable

from .program import BLOCK_SIZE


def blocks_for(num_tokens: int) -> int:
    """How many blocks hold the keys and values of `num_tokens` tokens."""
    return -(-num_tokens // BLOCK_SIZE)


class BlockPool:
    """Free list of block ids `0 .. num_blocks-1`.

    The block freed last is handed out first and a block never used before only when there is no other, so that a
    pool which is mapped lazily only grows to the most it ever held at one time.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._num_used = 0  # blocks from here on were never handed out
        self._freed: list[int] = []
        self._held: set[int] = set()

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return self.num_blocks - len(self._held)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks; the caller has checked `num_free`."""
        if count > self.num_free:
            raise AssertionError(f"asked for {count} blocks, but {self.num_free} of {self.num_blocks} are free")
        blocks = [self._freed.pop() for _ in range(min(count, len(self._freed)))]
        fresh = count - len(blocks)
        blocks += range(self._num_used, self._num_used + fresh)
        self._num_used += fresh
        self._held.update(blocks)
        return blocks

    def release(self, blocks: Iterable[int]) -> None:
        """Give blocks back; releasing one that is not held is a bug and raises AssertionError."""
        for block in blocks:
            if block not in self._held:
                raise AssertionError(f"block {block} was released, but it is not held")
            self._held.remove(block)
            self._freed.append(block)

    def check(self, tables: Iterable[list[int]]) -> None:
        """Compare the pool with the block tables of all requests; raises AssertionError with both sides."""
        held, freed, used = len(self._held), len(self._freed), self._num_used
        if held + freed != used or used > self.num_blocks:
            raise AssertionError(f"held {held} + freed {freed} != used {used} of {self.num_blocks} blocks")
        listed = [block for table in tables for block in table]
        if len(listed) != len(set(listed)):
            raise AssertionError(f"block tables list {len(listed)} blocks, but only {len(set(listed))} distinct ones")
        if set(listed) != self._held:
            raise AssertionError(f"block tables list {sorted(set(listed))}, but the pool holds {sorted(self._held)}")
