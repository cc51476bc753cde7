"""The stored formats of matrices on GPUs by the names graphs use (`bf16`, `fp8`, `w8a8`, `w4a16-g128`), and their layout."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, cast

import numpy as np

from ...errors import UsageError
from ...formats.floats import Array, Fp8Matrix, from_bf16, from_fp8, quantize_fp8, round_up, to_bf16
from ...formats.grid import Grid, MatrixValue, QuantizedMatrix
from ...formats.round_to_nearest import round_to_nearest
from ...formats.static_step import split_step
from ...runtime.program import WeightSpec

Kind: TypeAlias = Literal["bf16", "fp8", "fp8-fnuz", "w8a8", "w4a16"]
Operand: TypeAlias = Literal["bf16", "fp8", "int8"]

ROW_ALIGN = 16
"""Rows of matrices and of linear inputs are padded to a multiple of so many columns, so that each starts 16-byte aligned."""
_TENSOR_ALIGN = 64  # bytes to which a tensor's size is padded, so that the next one in the file is aligned
_DTYPES = {"bf16": "BF16", "fp8": "F8_E4M3", "fp8-fnuz": "U8", "w8a8": "I8"}
_OPERANDS: dict[str, Operand] = {"bf16": "bf16", "fp8": "fp8", "fp8-fnuz": "fp8", "w8a8": "int8", "w4a16": "bf16"}


def row_stride(width: int) -> int:
    """Elements from one row of a matrix or linear input to the next."""
    return round_up(width, ROW_ALIGN)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFormat:
    """`group` is the number of columns that share a scale, for w4a16 alone; `step` is that of all inputs where each row has none."""

    kind: Kind
    group: int | None = None
    step: float | None = None

    @classmethod
    def parse(cls, name: str) -> GpuFormat:
        """`"w4a16-g128"` -> kind w4a16 with groups of 128."""
        stored, step = split_step(name)
        base, _, group = stored.partition("-g")
        if base not in _OPERANDS or bool(group) != (base == "w4a16") or (group and not group.isdecimal()):
            raise UsageError(
                f"matrix format {name!r} is unknown on GPUs; formats are bf16, fp8, fp8-fnuz, w8a8, w4a16-g<group size>"
            )
        return cls(kind=cast(Kind, base), group=int(group) if group else None, step=step)

    @property
    def stored(self) -> GpuFormat:
        """The same without what concerns inputs alone."""
        return replace(self, step=None)

    def __str__(self) -> str:
        return f"{self.kind}-g{self.group}" if self.group else self.kind

    @property
    def operand(self) -> Operand:
        """How the rows of a linear's input are stored for this format of its weights."""
        return _OPERANDS[self.kind]

    @property
    def operand_row_bytes_per_value(self) -> int:
        """Bytes of one value of such a row; fp8 and int8 rows have a float32 scale each besides."""
        return 2 if self.operand == "bf16" else 1

    def specs(self, name: str, shape: tuple[int, ...]) -> list[WeightSpec]:
        """The tensors of a matrix `[N, K]` of that name: data, then scales if there are any."""
        n, k = shape
        if self.group is not None:
            groups = self._padded_columns(k) // self.group
            data = WeightSpec(name=name, dtype="U8", shape=[round_up(n, 4), groups * self.group // 2])
            return [data, WeightSpec(name=f"{name}.scale", dtype="F16", shape=[round_up(groups * n, _TENSOR_ALIGN // 2)])]
        rows = round_up(n, 2 if self.kind == "bf16" else 4)
        data = WeightSpec(name=name, dtype=_DTYPES[self.kind], shape=[rows, row_stride(k)])
        if self.kind == "bf16":
            return [data]
        return [data, WeightSpec(name=f"{name}.scale", dtype="F32", shape=[round_up(n, _TENSOR_ALIGN // 4)])]

    @property
    def grid(self) -> Grid | None:
        """The grid of an integer format."""
        return Grid.parse(str(self))

    def pack(self, value: MatrixValue) -> list[Array]:
        """The tensors of a matrix `[N, K]`, matching `specs`."""
        n, k = value.shape
        data_shape, *scale_shape = (spec.shape for spec in self.specs("", (n, k)))
        if self.grid is not None:
            matrix = round_to_nearest(value, self.grid) if isinstance(value, np.ndarray) else value
            assert isinstance(matrix, QuantizedMatrix), f"{self} holds integers"
            assert matrix.grid == self.grid, f"a matrix on {matrix.grid} for format {self}"
            return self._pack_integers(matrix, data_shape, scale_shape[0])
        if isinstance(value, Fp8Matrix):
            assert self.kind == "fp8", f"E4M3 numbers for format {self}"
            return [_padded(value.bits, data_shape), _padded(value.scale, scale_shape[0])]
        assert isinstance(value, np.ndarray), f"{self} holds no integers"
        if self.kind == "bf16":
            return [_padded(to_bf16(value), data_shape)]
        bits, scale = quantize_fp8(value, fnuz=self.kind == "fp8-fnuz")
        return [_padded(bits, data_shape), _padded(scale, scale_shape[0])]

    def _pack_integers(self, matrix: QuantizedMatrix, data_shape: list[int], scale_shape: list[int]) -> list[Array]:
        n, k = matrix.shape
        if self.group is None:
            return [_padded(matrix.codes, data_shape), _padded(matrix.scale[:, 0], scale_shape)]
        columns = self._padded_columns(k)
        q = _padded(matrix.codes, [n, columns])
        # Two neighbouring groups share bytes: the first in the low nibbles, the second in the high ones.
        pairs = (q + np.int8(8)).astype(np.uint8).reshape(n, -1, 2, self.group)
        packed = (pairs[:, :, 0] | pairs[:, :, 1] << np.uint8(4)).reshape(n, -1)
        scale = _padded(matrix.scale, [n, columns // self.group])
        return [_padded(packed, data_shape), _padded(np.ascontiguousarray(scale.T).reshape(-1), scale_shape)]

    def decode(self, value: Array) -> Array:
        """A float32 matrix as it comes back after being stored."""
        if self.grid is not None:
            return round_to_nearest(value, self.grid).dequantize()
        if self.kind == "bf16":
            return from_bf16(to_bf16(value))
        fnuz = self.kind == "fp8-fnuz"
        bits, scale = quantize_fp8(value, fnuz=fnuz)
        return from_fp8(bits, fnuz=fnuz) * scale[:, None]

    def _padded_columns(self, k: int) -> int:
        assert self.group is not None
        return round_up(k, 2 * self.group)


def _padded(tensor: Array, shape: list[int]) -> Array:
    """Zeros after the last row and column."""
    missing = [(0, want - have) for want, have in zip(shape, tensor.shape, strict=True)]
    return np.pad(tensor, missing) if any(after for _, after in missing) else tensor


def decode_matrix(value: Array, format: str) -> Array:
    """A float32 matrix as it comes back after being stored in `format`."""
    return np.asarray(GpuFormat.parse(format).decode(value), dtype=np.float32)


def vector_spec(name: str, length: int) -> WeightSpec:
    """The tensor of a float32 vector."""
    return WeightSpec(name=name, dtype="F32", shape=[round_up(length, _TENSOR_ALIGN // 4)])


def pack_vector(value: Array) -> Array:
    """A float32 vector, matching `vector_spec`."""
    flat = np.asarray(value, np.float32).reshape(-1)
    return _padded(flat, vector_spec("", len(flat)).shape)
