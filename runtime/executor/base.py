"""What the engine asks of a device: one step of the step contract, and sampling where the logits are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..block_pool import blocks_for

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]

# One row of llmc_sampling in docs/bundle.md.
SAMPLING_DTYPE = np.dtype(
    [
        ("temperature", np.float32),
        ("top_k", np.int32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("seed", np.uint64),
        ("offset", np.uint64),
    ]
)


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The arguments of one step: T tokens of B sequences, R of whose logits are wanted. All int32, C-contiguous."""

    token_ids: Int32  # [T]
    positions: Int32  # [T]
    query_start: Int32  # [B+1]
    context_len: Int32  # [B]
    block_table: Int32  # [B, max_blocks]
    logit_rows: Int32  # [R]
    slots: Int32  # [B], where each sequence has what it reads in 16 bit; distinct
    slot_start: Int32  # [B], the first position whose keys and values were computed with that slot

    @classmethod
    def build(
        cls,
        sequences: Sequence[tuple[Sequence[int], int, Sequence[int]]],
        logit_rows: Sequence[int],
        slots: Sequence[tuple[int, int]] | None = None,
    ) -> StepBatch:
        """From `(new token ids, tokens already in the pool, block table)` of each sequence.

        `slots` has `(slot, slot start)` of each; without it they are slots 0, 1, ... that have nothing of earlier steps.
        """
        lengths = [len(ids) for ids, _, _ in sequences]
        query_start = np.zeros(len(sequences) + 1, np.int32)
        np.cumsum(lengths, out=query_start[1:])
        token_ids = np.empty(query_start[-1], np.int32)
        positions = np.empty(query_start[-1], np.int32)
        context_len = np.empty(len(sequences), np.int32)
        used = [blocks_for(start + length) for (_, start, _), length in zip(sequences, lengths, strict=True)]
        block_table = np.full((len(sequences), max(used)), -1, np.int32)
        for index, (ids, start, blocks) in enumerate(sequences):
            begin, end = query_start[index], query_start[index + 1]
            token_ids[begin:end] = ids
            positions[begin:end] = np.arange(start, start + len(ids), dtype=np.int32)
            context_len[index] = start + len(ids)
            block_table[index, : used[index]] = blocks[: used[index]]
        if slots is None:
            slots = [(index, start) for index, (_, start, _) in enumerate(sequences)]
        slot, slot_start = np.ascontiguousarray(np.array(slots, np.int32).reshape(-1, 2).T)
        rows = np.asarray(logit_rows, np.int32)
        return cls(token_ids, positions, query_start, context_len, block_table, rows, slot, slot_start)


class Logits(Protocol):
    """The logits of one step, wherever they are; valid until the next step."""

    @property
    def num_rows(self) -> int:
        """R, the rows that were asked for."""
        ...

    def numpy(self) -> Float32:
        """`[R, vocab_size]` in the host's memory, in the order of the batch's `logit_rows`."""
        ...


@dataclass(frozen=True, slots=True)
class HostLogits:
    """`Logits` that a program wrote to the host's memory."""

    values: Float32  # [R, vocab_size]

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.values)

    def numpy(self) -> Float32:
        """The values in place."""
        return self.values


class Executor(Protocol):
    """A program on a device, with its weights, arena and KV pool."""

    @property
    def description(self) -> str:
        """Which device and code path is used, for people."""
        ...

    @property
    def num_kv_blocks(self) -> int:
        """Blocks in the KV pool."""
        ...

    def bind_weights(self) -> None:
        """Take the weights from the bundle, once their hash is known; raises BundleError. Before the first step."""
        ...

    @property
    def max_logit_rows(self) -> int:
        """The most logits that one step may be asked for."""
        ...

    def step(self, batch: StepBatch) -> Logits:
        """Compute the batch, whose `logit_rows` are distinct; raises BundleError if the program refuses it."""
        ...

    def sample(self, logits: Logits, sampling: npt.NDArray[np.void]) -> Int32:
        """One token id for each row of the last step's logits; `sampling` has one `SAMPLING_DTYPE` record for each row."""
        ...

    def close(self) -> None:
        """Free the memory. No other method may be called after it."""
        ...
