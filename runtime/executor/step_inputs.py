"""Lays the arrays of a step out one after another, so that one copy takes them all to the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .base import StepBatch

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class InputLayout:
    """Where each int32 array of a step begins in a buffer of `num_bytes`."""

    offsets: Mapping[str, int]
    num_bytes: int

    @classmethod
    def of(cls, *, num_tokens: int, num_seqs: int, num_rows: int, max_blocks: int) -> InputLayout:
        """The layout for T, B, R and the width of the block table."""
        counts = {
            "token_ids": num_tokens,
            "positions": num_tokens,
            "query_start": num_seqs + 1,
            "context_len": num_seqs,
            "logit_rows": num_rows,
            "block_table": num_seqs * max_blocks,
        }
        offsets = {}
        end = 0
        for name, count in counts.items():
            offsets[name] = end
            end += -(-4 * count // _ALIGNMENT) * _ALIGNMENT
        return cls(offsets, end)

    @classmethod
    def of_batch(cls, batch: StepBatch) -> InputLayout:
        """The layout that `batch` needs."""
        num_seqs, max_blocks = batch.block_table.shape
        return cls.of(num_tokens=len(batch.token_ids), num_seqs=num_seqs, num_rows=len(batch.logit_rows), max_blocks=max_blocks)

    def addresses(self, base: int) -> dict[str, int]:
        """The address of each array of a buffer that begins at `base`."""
        return {name: base + offset for name, offset in self.offsets.items()}

    def write(self, batch: StepBatch, buffer: npt.NDArray[np.uint8]) -> None:
        """Copy the arrays of `batch` to their places."""
        for name, offset in self.offsets.items():
            values = getattr(batch, name).reshape(-1)
            buffer[offset : offset + values.nbytes].view(np.int32)[:] = values
