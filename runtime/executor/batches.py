"""Takes a mixed batch apart into single-token and other sequences, and pads a batch to the size of a captured graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..block_pool import blocks_for
from ..program import Program
from .base import Int32, StepBatch

_LEAST_WIDTH = 64  # of a block table that a graph is captured for: 1,024 tokens


@dataclass(frozen=True, slots=True)
class Part:
    """Some sequences of a batch as a batch of their own; row `i` of its logits is row `rows[i]` of the whole's."""

    batch: StepBatch
    rows: Int32


def split(batch: StepBatch, max_single: int) -> tuple[Part | None, Part | None]:
    """The sequences of one token, and all others; None for a part without sequences.

    If more than `max_single` sequences have one token, all are in the second part.
    """
    lengths = np.diff(batch.query_start)
    single = lengths == 1
    num_single = int(single.sum())
    everything = Part(batch, np.arange(len(batch.logit_rows), dtype=np.int32))
    if num_single == 0 or num_single > max_single:
        return None, everything
    if num_single == len(lengths):
        return everything, None
    return _select(batch, lengths, single), _select(batch, lengths, ~single)


def _select(batch: StepBatch, lengths: Int32, chosen: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Part:
    tokens = np.repeat(chosen, lengths)  # [T]: whether a token belongs to a chosen sequence
    new_index = np.cumsum(tokens, dtype=np.int32) - 1  # [T]: its index among those
    query_start = np.zeros(int(chosen.sum()) + 1, np.int32)
    np.cumsum(lengths[chosen], out=query_start[1:])
    context_len = batch.context_len[chosen]
    width = blocks_for(int(context_len.max()))
    rows = np.flatnonzero(tokens[batch.logit_rows]).astype(np.int32)
    part = StepBatch(
        token_ids=batch.token_ids[tokens],
        positions=batch.positions[tokens],
        query_start=query_start,
        context_len=context_len,
        block_table=np.ascontiguousarray(batch.block_table[chosen, :width]),
        logit_rows=new_index[batch.logit_rows[rows]],
        slots=batch.slots[chosen],
        slot_start=batch.slot_start[chosen],
    )
    return Part(part, rows)


def pad(batch: StepBatch, num_seqs: int, width: int) -> StepBatch:
    """A batch of single tokens as one of `num_seqs` sequences, a block table of `width` columns and logits of every row.

    The added sequences have context length 0, position -1 and token id 0, by which kernels know to write nothing for them.
    """
    missing = num_seqs - len(batch.context_len)
    unused = int(batch.slots.max(initial=-1)) + 1
    block_table = np.zeros((num_seqs, width), np.int32)
    used = batch.block_table.shape[1]
    block_table[: len(batch.block_table), :used] = batch.block_table
    return StepBatch(
        token_ids=np.pad(batch.token_ids, (0, missing)),
        positions=np.pad(batch.positions, (0, missing), constant_values=-1),
        query_start=np.arange(num_seqs + 1, dtype=np.int32),
        context_len=np.pad(batch.context_len, (0, missing)),
        block_table=block_table,
        logit_rows=np.arange(num_seqs, dtype=np.int32),
        slots=np.concatenate((batch.slots, np.arange(unused, unused + missing, dtype=np.int32))),
        slot_start=np.pad(batch.slot_start, (0, missing)),
    )


def bucket_sizes(program: Program, max_num_seqs: int) -> list[int]:
    """Batch sizes to capture graphs for: 1, 2, 4, ... up to what the single-token phases and the engine need."""
    limit = max((phase.max_tokens for phase in program.phases if phase.single_token), default=0)
    sizes = []
    size = 1
    while size < min(limit, max_num_seqs):
        sizes.append(size)
        size *= 2
    return [*sizes, min(size, limit)] if limit else []


def bucket_for(count: int, sizes: Sequence[int]) -> int:
    """The smallest of `sizes`, which ascend, that holds `count`."""
    return next(size for size in sizes if size >= count)


def table_width(used: int, most: int) -> int:
    """Columns of the block table of a graph for sequences of up to `used` blocks: 64, 256, ... but at most `most`."""
    width = _LEAST_WIDTH
    while width < used:
        width *= 4
    return min(width, most)
