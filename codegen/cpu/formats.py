"""The stored formats of matrices by the names users see (`f16`, `int8`, `int4-g32-asym`), and how a matrix becomes one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np

from ...errors import UsageError
from ...formats.floats import Array, Float32, to_bf16
from ...formats.grid import BITS, GROUP_SIZES, Grid, MatrixValue, QuantizedMatrix
from ...formats.round_to_nearest import round_to_nearest
from . import packing
from .packing import Format

_FLOATS: dict[str, str] = {"f32": "F32", "f16": "F16", "bf16": "BF16"}  # with their safetensors types


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixFormat:
    """`kind` names the kernels' format; `group` is the number of columns that share a scale, None for i8 and floats."""

    kind: Format
    group: int | None = None

    @classmethod
    def parse(cls, name: str) -> MatrixFormat:
        """`"int4-g32"` -> kind i4 with groups of 32. Raises `UsageError` for a name that is not of a CPU format."""
        if name in _FLOATS:
            return cls(kind=cast(Format, name))
        grid = Grid.parse(name)
        if grid is None or str(grid) != name:  # some grids have another name on GPUs
            raise UsageError(
                f"matrix format {name!r} is unknown; formats are {', '.join(_FLOATS)}, int8, and int<bits>-g<group size> with or "
                f"without -asym, with {', '.join(map(str, BITS))} bits and groups of {', '.join(map(str, GROUP_SIZES))}"
            )
        suffix = "a" if not grid.symmetric else "g" if grid.bits == 8 and grid.group else ""
        return cls(kind=cast(Format, f"i{grid.bits}{suffix}"), group=grid.group)

    def __str__(self) -> str:
        return str(self.grid or self.kind)

    @property
    def grid(self) -> Grid | None:
        """The grid of an integer format."""
        if self.kind in _FLOATS:
            return None
        return Grid(bits=int(self.kind[1]), group=self.group, symmetric=not self.kind.endswith("a"))

    @property
    def dtype(self) -> str:
        """Safetensors type of the data tensor."""
        return _FLOATS.get(self.kind, "U8")

    def data_shape(self, blocks: int, columns: int) -> list[int]:
        """Shape of the data tensor of `blocks` blocks of 16 rows and `columns` padded columns."""
        if self.grid is not None:
            return [blocks, columns * self.grid.bits // 32, packing.BLOCK, 4]
        return [blocks, columns // 2, packing.BLOCK, 2] if self.kind == "bf16" else [blocks, columns, packing.BLOCK]

    def pack(self, value: MatrixValue) -> list[Array]:
        """The data tensor and, for integers, the scale tensor of a matrix `[N, K]`."""
        grid = self.grid
        if grid is not None:
            matrix = round_to_nearest(value, grid) if isinstance(value, np.ndarray) else value
            assert isinstance(matrix, QuantizedMatrix), f"{self} holds integers"
            return self._pack_integers(matrix, grid)
        assert isinstance(value, np.ndarray), f"{self} holds no integers"
        if self.kind == "bf16":
            return [packing.pack_bf16(to_bf16(value))]
        return [packing.pack_f32(value) if self.kind == "f32" else packing.pack_f16(value)]

    def _pack_integers(self, value: QuantizedMatrix, grid: Grid) -> list[Array]:
        assert value.grid == grid, f"a matrix on {value.grid} for format {self}"
        offset = _offset(grid)
        codes = value.codes.view(np.uint8) + np.uint8(offset)  # two's complement wraps as it should
        data = packing.pack_codes(codes, grid.bits, offset)
        if grid.group is None:
            return [data, packing.pack_vector(value.scale[:, 0])]
        return [data, packing.pack_scales(np.asarray(value.scale, np.float16), value.minimum)]

    def unpack(self, tensors: list[Array], shape: tuple[int, int]) -> Float32:
        """The float32 matrix that packed tensors stand for."""
        if self.grid is not None:
            return self.unpack_integers(tensors, shape).dequantize()
        if self.kind == "bf16":
            return packing.unpack_bf16(tensors[0], *shape)
        return packing.unpack_float(tensors[0], *shape)

    def unpack_integers(self, tensors: list[Array], shape: tuple[int, int]) -> QuantizedMatrix:
        """The matrix on its grid that packed tensors stand for; for integer formats alone."""
        grid, (n, k) = self.grid, shape
        assert grid is not None, f"{self} holds no integers"
        data, scale = tensors
        codes = packing.unpack_codes(data, grid.bits, n, k) - np.uint8(_offset(grid))
        if grid.group is None:
            return QuantizedMatrix(grid=grid, codes=codes.view(np.int8), scale=np.ascontiguousarray(scale[:n, None]))
        scales = packing.unpack_scales(scale, n)
        if grid.symmetric:
            return QuantizedMatrix(grid=grid, codes=codes.view(np.int8), scale=scales)
        return QuantizedMatrix(grid=grid, codes=codes, scale=scales[..., 0], minimum=scales[..., 1])


def _offset(grid: Grid) -> int:
    """What stored codes lie above the grid's."""
    return 1 << (grid.bits - 1) if grid.symmetric else 0


def decode_matrix(value: Array, format: str) -> Array:
    """A float32 matrix as it comes back after being stored in `format`."""
    parsed = MatrixFormat.parse(format)
    rows, columns = value.shape
    return parsed.unpack(parsed.pack(value), (rows, columns))
