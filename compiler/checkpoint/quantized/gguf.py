"""GGUF blocks whose codes and scales lie on a grid: all but the k-quants with groups of 16 (layouts: ggml-common.h)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ....errors import CheckpointError
from ....quantization.grid import Grid, QuantizedMatrix, num_groups
from ....quantization.number_formats import Array, Float32
from .base import QuantizedWeight, StoredKind
from .integer import round_scales

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
        """From the type alone: scales lie among the codes. Q4_K and Q5_K whose scales leave float16's range are converted after all."""
        name = self.stored_type
        if name in _SIXTEENS:
            return StoredKind(stored=name, bits=_SIXTEENS[name], group=16, kept_as=None, remark="no grid has groups of 16")
        remark = "scales and minimums rounded to float16, by at most 2^-11 of the largest" if name.endswith("_K") else ""
        return StoredKind(stored=name, bits=_GRIDS[name].bits, group=_GROUP, kept_as=str(_GRIDS[name]), remark=remark)

    def matrix(self) -> QuantizedMatrix | None:
        grid = _GRIDS.get(self.stored_type)
        if grid is None:
            return None
        blocks = self._blocks()
        decode = _decode_k if self.stored_type.endswith("_K") else _decode
        codes, scale, minimum = decode(blocks, grid)
        for values in (scale, minimum):
            if values is not None and not np.isfinite(values).all():
                raise CheckpointError(
                    f"{self.where}: holds scales that are NaN or infinite, expected finite ones; download it again"
                )
        halves = [None if values is None else round_scales(self._groups(values)) for values in (scale, minimum)]
        if halves[0] is None or (halves[1] is None and minimum is not None):
            return None
        return QuantizedMatrix(
            grid=grid,
            codes=self._reorder(codes.reshape(self.shape)),
            scale=halves[0][0],
            minimum=None if halves[1] is None else halves[1][0],
        )

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


def _decode(blocks: npt.NDArray[np.uint8], grid: Grid) -> tuple[Array, Float32, Float32 | None]:
    """Blocks of 32: codes `[B, 32]`, scale and minimum `[B]`.

    A half for the scale, for `_1` types another for the minimum, for 5 bits a word of high bits, then nibbles of which j and j + 16
    share a byte; or a half and signed bytes.
    """
    scale, at = _half(blocks, 0), 2
    if grid.bits == 8:
        return blocks[:, at:].view(np.int8), scale, None
    minimum = None
    if not grid.symmetric:
        minimum, at = _half(blocks, at), at + 2
    nibbles = blocks[:, -16:]
    codes = np.concatenate((nibbles & np.uint8(15), nibbles >> np.uint8(4)), axis=1)
    if grid.bits == 5:
        codes |= np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << np.uint8(4)
    return (codes.view(np.int8) - np.int8(-grid.low) if grid.symmetric else codes), scale, minimum


def _decode_k(blocks: npt.NDArray[np.uint8], grid: Grid) -> tuple[Array, Float32, Float32 | None]:
    """Super-blocks of 8 groups: codes `[B, 8, 32]`, scale and minimum `[B, 8]`.

    Two halves scale 6-bit scales and minimums, which 12 bytes hold: the low 6 bits of bytes 0-3 and 4-7 are those of groups 0-3; for
    groups 4-7 the nibbles of bytes 8-11 are the low bits, and the top bits of bytes 0-7 the high ones. For 5 bits, bit g of byte i of
    the next 32 is the high bit of value i in group g. Groups 2j and 2j + 1 are the low and high nibbles of 32 bytes.
    """
    packed = blocks[:, 4:16]
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale = np.concatenate((first & 63, third & 15 | first >> 6 << 4), axis=1).astype(np.float32)
    minimum = np.concatenate((second & 63, third >> 4 | second >> 6 << 4), axis=1).astype(np.float32)
    nibbles = blocks[:, -128:].reshape(-1, 4, 1, 32)
    codes = np.concatenate((nibbles & np.uint8(15), nibbles >> np.uint8(4)), axis=2).reshape(-1, 8, 32)
    if grid.bits == 5:
        high = np.unpackbits(blocks[:, 16:48, None], axis=2, bitorder="little")  # [B, 32, 8]
        codes |= high.transpose(0, 2, 1) << np.uint8(4)
    with np.errstate(invalid="ignore"):  # damaged halves: the caller looks
        return codes, scale * _half(blocks, 0)[:, None], -minimum * _half(blocks, 2)[:, None]


def _half(blocks: npt.NDArray[np.uint8], at: int) -> Float32:
    values: Float32 = np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16)[:, 0].astype(np.float32)
    return values
