"""Decides how many blocks the KV pool has, from the program, the number of requests and the memory there is."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import CapacityError
from .block_pool import blocks_for
from .program import Program

_TYPICAL_CONTEXT = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSize:
    """Blocks to allocate: `exact` if the user has said how much, else between `typical` and `wanted`."""

    block_bytes: int
    typical: int  # one request of 4,096 tokens, or of the context if that is shorter
    wanted: int  # one request of the full context, or `typical` for each running request, whichever is more
    exact: int | None = None

    @classmethod
    def of(cls, program: Program, *, max_num_seqs: int, kv_cache_bytes: int | None) -> PoolSize:
        """The pool for so many running requests; raises CapacityError if `kv_cache_bytes` holds no block."""
        size = program.kv_cache.bytes_per_block
        if kv_cache_bytes is not None and kv_cache_bytes < size:
            raise CapacityError(f"kv_cache_bytes={kv_cache_bytes} is less than one KV block of {size} bytes")
        typical = blocks_for(min(program.context_length, _TYPICAL_CONTEXT))
        return cls(
            block_bytes=size,
            typical=typical,
            wanted=max(blocks_for(program.context_length), typical * max_num_seqs),
            exact=None if kv_cache_bytes is None else kv_cache_bytes // size,
        )

    def on_host(self, available_bytes: int) -> int:
        """Blocks where only what is used costs memory; `available_bytes` is 0 if unknown."""
        if self.exact is not None:
            return self.exact
        return max(self.typical, min(self.wanted, available_bytes // self.block_bytes))

    def on_device(self, available_bytes: int) -> int:
        """Blocks where every block costs memory at once: 0 if none fits."""
        if self.exact is not None:
            return self.exact
        return max(min(self.wanted, available_bytes // self.block_bytes), 0)
