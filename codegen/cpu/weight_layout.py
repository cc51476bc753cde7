"""How graph weights become the tensors a CPU program takes: their names, types, shapes and packed bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...formats.floats import Array, round_up
from ...formats.grid import COLUMN_ALIGN, MatrixValue, QuantizedMatrix
from ...runtime.program import WeightSpec
from ...runtime.weights import tensor_bytes
from . import packing
from .formats import MatrixFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeight:
    """One graph weight as a program reads it.

    `name` is the graph's name and `shape` its shape there. A matrix has a `format`; a vector has None and gets `offset` added (norms
    that multiply by 1 + w). `glu` alternates blocks of gate and up rows.
    """

    name: str
    shape: tuple[int, ...]
    format: MatrixFormat | None = None
    glu: bool = False
    offset: float = 0.0

    @property
    def kind(self) -> str:
        """The format as reports name it."""
        return str(self.format) if self.format else "vectors"

    def specs(self) -> list[WeightSpec]:
        """The tensors in the order in which a program takes their pointers."""
        rows = self._padded_rows()
        if self.format is None:
            return [WeightSpec(name=self.name, dtype="F32", shape=[rows])]
        blocks, columns = rows // packing.BLOCK, round_up(self.shape[1], COLUMN_ALIGN)
        data = WeightSpec(name=self.name, dtype=self.format.dtype, shape=self.format.data_shape(blocks, columns))
        grid = self.format.grid
        if grid is None:
            return [data]
        if grid.group is None:
            return [data, WeightSpec(name=f"{self.name}.scale", dtype="F32", shape=[rows])]
        even = round_up(blocks, 2)  # so that its bytes are a multiple of 64, as every tensor's
        parts = [] if grid.symmetric else [2]  # scale and minimum
        shape = [even, grid.num_groups(self.shape[1]), *parts, packing.BLOCK]
        return [data, WeightSpec(name=f"{self.name}.scale", dtype="F16", shape=shape)]

    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor_bytes(spec.dtype, spec.shape) for spec in self.specs())

    def tensors(self, value: MatrixValue) -> list[Array]:
        """The packed tensors of a `value` of `shape`, matching `specs()`."""
        if self.glu:
            halves = zip(*(self._pack(half) for half in _halves(value)), strict=True)
            return [packing.interleave(gate, up) for gate, up in halves]
        return [_pad_blocks(t, spec.shape[0]) for t, spec in zip(self._pack(value), self.specs(), strict=True)]

    def _pack(self, value: MatrixValue) -> list[Array]:
        if self.format is None:
            assert isinstance(value, np.ndarray), f"{self.name} is a vector"
            return [packing.pack_vector(value + np.float32(self.offset))]
        return self.format.pack(value)

    def _padded_rows(self) -> int:
        if self.glu:  # each half is padded on its own
            return 2 * round_up(self.shape[0] // 2, packing.BLOCK)
        return round_up(self.shape[0], packing.BLOCK)


def _halves(value: MatrixValue) -> tuple[MatrixValue, MatrixValue]:
    middle = value.shape[0] // 2
    if not isinstance(value, np.ndarray):
        assert isinstance(value, QuantizedMatrix), "no other matrix comes quantised"
        return value.rows(0, middle), value.rows(middle, 2 * middle)
    return value[:middle], value[middle:]


def _pad_blocks(tensor: Array, blocks: int) -> Array:
    """Zeros after the last block."""
    missing = blocks - tensor.shape[0]
    return np.pad(tensor, [(0, missing), *[(0, 0)] * (tensor.ndim - 1)]) if missing else tensor
