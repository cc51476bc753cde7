"""Works out what a GPU program takes of a device's memory, and what that leaves for the KV pool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...errors import CapacityError
from ..block_pool import blocks_for
from ..pool_size import PoolSize
from ..program import GpuProgram
from .base import SAMPLING_DTYPE
from .batches import bucket_sizes
from .step_inputs import InputLayout

_PREFILL_ROWS = 256  # of logits beside those of a decode batch: what one step may be asked for when quality is measured
_ROW_ALIGNMENT = 4  # rows after which every array that has one item or more a row is 16-byte aligned again
_HEADROOM = 0.1  # of the device's memory, for graphs, code and other programs


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBudget:
    """Sizes in bytes. Row `prefill_row` of the logits is the first that is not a decode batch's."""

    buckets: list[int]  # batch sizes of graphs, ascending
    most_blocks: int  # of a sequence
    prefill_row: int
    max_logit_rows: int  # of one step
    weight_bytes: Mapping[str, int]  # by file
    arena_bytes: int
    logits_bytes: int
    decode_input_bytes: int
    prefill_input_bytes: int

    @classmethod
    def of(cls, program: GpuProgram, weight_bytes: Mapping[str, int], *, max_num_seqs: int) -> DeviceBudget:
        """What is needed for up to `max_num_seqs` sequences a step."""
        buckets = bucket_sizes(program, max_num_seqs)
        most = max(buckets, default=0)
        blocks = blocks_for(program.context_length)
        prefill_row = -(-most // _ROW_ALIGNMENT) * _ROW_ALIGNMENT
        rows = min(program.max_tokens, max(_PREFILL_ROWS, max_num_seqs))
        seqs = min(program.max_tokens, max_num_seqs)
        decode = InputLayout.of(num_tokens=most, num_seqs=most, num_rows=most, max_blocks=blocks)
        prefill = InputLayout.of(num_tokens=program.max_tokens, num_seqs=seqs, num_rows=rows, max_blocks=blocks)
        return cls(
            buckets=buckets,
            most_blocks=blocks,
            prefill_row=prefill_row,
            max_logit_rows=rows,
            weight_bytes=weight_bytes,
            arena_bytes=program.arena_bytes,
            logits_bytes=4 * program.vocab_size * (prefill_row + rows),
            decode_input_bytes=decode.num_bytes,
            prefill_input_bytes=prefill.num_bytes,
        )

    @property
    def num_rows(self) -> int:
        """Rows of logits, sampling records and sampled ids."""
        return self.prefill_row + self.max_logit_rows

    @property
    def num_bytes(self) -> int:
        """Everything but the KV pool."""
        per_row = SAMPLING_DTYPE.itemsize + 4
        inputs = self.decode_input_bytes + self.prefill_input_bytes
        return sum(self.weight_bytes.values()) + self.arena_bytes + self.logits_bytes + inputs + per_row * self.num_rows

    def kv_blocks(self, pool: PoolSize, free_bytes: int, what: str) -> int:
        """Blocks for which a device with `free_bytes` has room; raises CapacityError, which begins with `what`, if there is none."""
        blocks = pool.on_device(int(free_bytes * (1 - _HEADROOM)) - self.num_bytes)
        if not blocks:
            raise CapacityError(
                f"{what} needs {self.num_bytes} bytes ({sum(self.weight_bytes.values())} of weights, {self.arena_bytes} of arena, "
                f"{self.logits_bytes} of logits) and KV blocks of {pool.block_bytes}, but {free_bytes} are free, of which a tenth "
                "is left alone; compile a target with smaller weights or free some memory"
            )
        return blocks
