"""The stored formats of matrices by the names users see (`f32`, `int8-g32`, `int4-g32`), and how a matrix becomes one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...errors import UsageError
from ...quantization.grid import Grid, MatrixValue, QuantizedMatrix
from ...quantization.number_formats import Array, to_bf16
from ...quantization.round_to_nearest import round_to_nearest
from . import packing
from .packing import Format

_KINDS: dict[str, Format] = {"f32": "f32", "bf16": "bf16", "int8": "i8", "int8-g": "i8g", "int4-g": "i4"}
_NAMES = {kind: name for name, kind in _KINDS.items()}
_DTYPES = {"f32": "F32", "bf16": "BF16", "i8": "U8", "i8g": "U8", "i4": "U8"}
_PER_WORD = {"f32": 1, "bf16": 2, "i8": 4, "i8g": 4, "i4": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixFormat:
    """`kind` names the kernels' format; `group` is the number of columns that share a scale, for i8g and i4 alone."""

    kind: Format
    group: int | None = None

    @classmethod
    def parse(cls, name: str) -> MatrixFormat:
        """`"int4-g32"` -> kind i4 with groups of 32."""
        base, mark, group = name.partition("-g")
        kind = _KINDS.get(base + mark)
        if kind is None or bool(mark) != group.isdecimal():
            raise UsageError(
                f"matrix format {name!r} is unknown; formats are f32, bf16, int8, int8-g<group size> and int4-g<group size>"
            )
        return cls(kind=kind, group=int(group) if group else None)

    def __str__(self) -> str:
        return f"{_NAMES[self.kind]}{self.group or ''}"

    @property
    def dtype(self) -> str:
        """Safetensors type of the data tensor."""
        return _DTYPES[self.kind]

    def data_shape(self, blocks: int, columns: int) -> list[int]:
        """Shape of the data tensor of `blocks` blocks of 16 rows and `columns` padded columns."""
        per_word = _PER_WORD[self.kind]
        lanes = [packing.BLOCK] if self.kind == "f32" else [packing.BLOCK, min(per_word, 4)]
        return [blocks, columns // per_word, *lanes]

    @property
    def grid(self) -> Grid | None:
        """The grid of an integer format."""
        return Grid.parse(str(self))

    def pack(self, value: MatrixValue) -> list[Array]:
        """The data tensor and, for integers, the scale tensor of a matrix `[N, K]`."""
        if self.grid is not None:
            return list(
                self._pack_integers(value if isinstance(value, QuantizedMatrix) else round_to_nearest(value, self.grid))
            )
        assert not isinstance(value, QuantizedMatrix), f"{self} holds no integers"
        return [packing.pack_f32(value) if self.kind == "f32" else packing.pack_bf16(to_bf16(value))]

    def _pack_integers(self, value: QuantizedMatrix) -> tuple[Array, Array]:
        assert value.grid == self.grid, f"a matrix on {value.grid} for format {self}"
        codes = value.codes.view(np.int8)
        if self.kind == "i8":
            return packing.pack_int8(codes, value.scale[:, 0])
        return packing.pack_int8_groups(codes, value.scale) if self.kind == "i8g" else packing.pack_int4(codes, value.scale)

    def unpack(self, tensors: list[Array], shape: tuple[int, int]) -> Array:
        """The float32 matrix that packed tensors stand for."""
        return packing.unpack(self.kind, tensors[0], tensors[1] if len(tensors) > 1 else None, *shape, self.group)


def decode_matrix(value: Array, format: str) -> Array:
    """A float32 matrix as it comes back after being stored in `format`."""
    parsed = MatrixFormat.parse(format)
    rows, columns = value.shape
    return np.asarray(parsed.unpack(parsed.pack(value), (rows, columns)), dtype=np.float32)
