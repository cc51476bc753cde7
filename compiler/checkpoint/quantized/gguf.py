"""GGUF blocks whose codes and scales lie on a grid: all but the k-quants with groups of 16 (layouts: ggml-common.h)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ....errors import CheckpointError
from ....formats.floats import Array, Float32
from ....formats.grid import Grid, QuantizedMatrix, num_groups
from .base import QuantizedWeight, StoredKind
from .integer import OUT_OF_RANGE, round_scales

Half: TypeAlias = "npt.NDArray[np.float16]"

_GROUP = 32
_GRIDS = {
    "Q8_0": Grid(bits=8, group=_GROUP),
    "Q4_0": Grid(bits=4, group=_GROUP),
    "Q5_0": Grid(bits=5, group=_GROUP),
    "Q4_1": Grid(bits=4, group=_GROUP, symmetric=False),
    "Q5_1": Grid(bits=5, group=_GROUP, symmetric=False),
    "Q4_K": Grid(bits=4, group=_GROUP, symmetric=False),
    "Q5_K": Grid(bits=5, group=_GROUP, symmetric=False),
}
_SIXTEENS = {"Q2_K": 2, "Q3_K": 3, "Q6_K": 6}  # bits


class GgufWeight(QuantizedWeight):
    """A matrix of quantised blocks; its rows are put into HF order by `reorder`, which takes and returns `[N, ...]`."""

    def __init__(
        self,
        type_name: str,
        shape: tuple[int, int],
        where: str,
        *,
        blocks: Callable[[], npt.NDArray[np.uint8]],
        reorder: Callable[[Array], Array],
        values: Callable[[], Float32],
    ) -> None:
        """`blocks()` gives uint8 `[number of blocks, bytes]` and `values()` the dequantised matrix in HF order."""
        self.stored_type = type_name
        self.shape = shape
        self.where = where
        self._blocks = blocks
        self._reorder = reorder
        self._values = values

    def kind(self) -> StoredKind:
        name = self.stored_type
        if name in _SIXTEENS:
            return StoredKind(stored=name, bits=_SIXTEENS[name], group=16, kept_as=None, remark="no grid has groups of 16")
        grid, remark = _GRIDS[name], ""
        if name.endswith("_K"):  # only products can be out of range
            fits = self._scales(self._blocks()) is not None
            remark = f"scales and minimums {'rounded to float16, by at most 2^-11 of the largest' if fits else OUT_OF_RANGE}"
            if not fits:
                return StoredKind(stored=name, bits=grid.bits, group=_GROUP, kept_as=None, remark=remark)
        return StoredKind(stored=name, bits=grid.bits, group=_GROUP, kept_as=str(grid), remark=remark)

    def matrix(self) -> QuantizedMatrix | None:
        grid = _GRIDS.get(self.stored_type)
        if grid is None:
            return None
        blocks = self._blocks()
        scales = self._scales(blocks)
        if scales is None:
            return None
        codes = (_codes_k if self.stored_type.endswith("_K") else _codes)(blocks, grid)
        return QuantizedMatrix(grid=grid, codes=self._reorder(codes.reshape(self.shape)), scale=scales[0], minimum=scales[1])

    def _scales(self, blocks: npt.NDArray[np.uint8]) -> tuple[Half, Half | None] | None:
        """Scales and minimums `[N, G]` in HF order; None where float16 cannot hold them."""
        halves: list[Half] = []
        for values in _scales_k(blocks) if self.stored_type.endswith("_K") else _scales(blocks, _GRIDS[self.stored_type]):
            if not np.isfinite(values).all():
                raise CheckpointError(
                    f"{self.where}: holds scales that are NaN or infinite, expected finite ones; download it again"
                )
            rounded = round_scales(self._groups(values))
            if rounded is None:
                return None
            halves.append(rounded[0])
        return halves[0], halves[1] if len(halves) > 1 else None

    def dequantize(self) -> Float32:
        return self._values()

    def _groups(self, values: Float32) -> Float32:
        """A value for each group, to `[N, G]` in HF order with the groups of a grid."""
        n, k = self.shape
        ordered = self._reorder(values.reshape(n, -1))
        padded: Float32 = np.pad(ordered, ((0, 0), (0, num_groups(k, _GROUP) - ordered.shape[1])))
        return padded


def is_quantized(type_name: str) -> bool:
    """Whether the type stores codes and scales."""
    return type_name in _GRIDS or type_name in _SIXTEENS


def _scales(blocks: npt.NDArray[np.uint8], grid: Grid) -> list[Float32]:
    """The scale, for an asymmetric grid also the minimum, of blocks of 32: `[B]` each, the halves at their start."""
    return [_half(blocks, 0)] if grid.symmetric else [_half(blocks, 0), _half(blocks, 2)]


def _codes(blocks: npt.NDArray[np.uint8], grid: Grid) -> Array:
    """Codes `[B, 32]` of blocks of 32, at their end: signed bytes; or nibbles of which j and j + 16 share a byte, before them for 5
    bits a word of high bits.
    """
    if grid.bits == 8:
        return blocks[:, -32:].view(np.int8)
    nibbles = blocks[:, -16:]
    codes = np.concatenate((nibbles & np.uint8(15), nibbles >> np.uint8(4)), axis=1)
    if grid.bits == 5:
        codes |= np.unpackbits(blocks[:, -20:-16], axis=1, bitorder="little") << np.uint8(4)
    return codes.view(np.int8) - np.int8(-grid.low) if grid.symmetric else codes


def _scales_k(blocks: npt.NDArray[np.uint8]) -> list[Float32]:
    """Scales and minimums `[B, 8]` of super-blocks of 8 groups.

    Two halves scale 6-bit scales and minimums, which 12 bytes hold: the low 6 bits of bytes 0-3 and 4-7 are those of groups 0-3; for
    groups 4-7 the nibbles of bytes 8-11 are the low bits, and the top bits of bytes 0-7 the high ones.
    """
    packed = blocks[:, 4:16]
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale = np.concatenate((first & 63, third & 15 | first >> 6 << 4), axis=1).astype(np.float32)
    minimum = np.concatenate((second & 63, third >> 4 | second >> 6 << 4), axis=1).astype(np.float32)
    with np.errstate(invalid="ignore"):  # damaged halves: the caller looks
        return [scale * _half(blocks, 0)[:, None], -minimum * _half(blocks, 2)[:, None]]


def _codes_k(blocks: npt.NDArray[np.uint8], grid: Grid) -> Array:
    """Codes `[B, 8, 32]`: groups 2j and 2j + 1 are the low and high nibbles of 32 of the last 128 bytes. For 5 bits, bit g of byte i
    of the 32 before them is the high bit of value i in group g.
    """
    nibbles = blocks[:, -128:].reshape(-1, 4, 1, 32)
    codes = np.concatenate((nibbles & np.uint8(15), nibbles >> np.uint8(4)), axis=2).reshape(-1, 8, 32)
    if grid.bits == 5:
        high = np.unpackbits(blocks[:, 16:48, None], axis=2, bitorder="little")  # [B, 32, 8]
        codes |= high.transpose(0, 2, 1) << np.uint8(4)
    return codes


def _half(blocks: npt.NDArray[np.uint8], at: int) -> Float32:
    values: Float32 = np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16)[:, 0].astype(np.float32)
    return values
