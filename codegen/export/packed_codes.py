"""How compressed-tensors lays out the tensors of a quantised matrix, and back: `weight_packed`, `weight_scale`, `weight_zero_point`."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from ...formats.floats import Array
from ...formats.grid import Grid, QuantizedMatrix


def pack_matrix(value: QuantizedMatrix) -> dict[str, Tensor]:
    """The tensors of format `pack-quantized`, by the suffix of their names.

    `weight_packed` int32 `[N, ceil(K * bits / 32)]` of code + 2^(bits-1), `weight_scale` `[N, G]` of the matrix's own type,
    `weight_shape`, and for an asymmetric grid, whose minimums must be multiples of the scales, `weight_zero_point` int32
    `[ceil(N * bits / 32), G]`.
    """
    n, k = value.shape
    bits, groups = value.grid.bits, _groups(value.grid, k)
    offset = (1 << (bits - 1)) if value.grid.symmetric else 0
    unsigned = (value.codes.astype(np.int16) + offset).astype(np.uint8)
    tensors = {
        "weight_packed": torch.from_numpy(_pack(unsigned, bits)),
        "weight_scale": torch.from_numpy(np.ascontiguousarray(value.scale[:, :groups])),
        "weight_shape": torch.tensor([n, k], dtype=torch.int64),
    }
    zeros = zero_points(value)
    if zeros is not None:
        packed = _pack(np.ascontiguousarray(zeros[:, :groups].T), bits).T
        tensors["weight_zero_point"] = torch.from_numpy(np.ascontiguousarray(packed))
    return tensors


def unpack_matrix(tensors: Mapping[str, Tensor], bits: int, group: int | None) -> Tensor:
    """The float32 `[N, K]` that the tensors of `pack-quantized` stand for."""
    n, k = (int(size) for size in tensors["weight_shape"])
    codes = _unpack(tensors["weight_packed"].numpy(), bits, k).astype(np.float32)
    scale = tensors["weight_scale"].float()
    zeros = np.full((n, scale.shape[1]), 1 << (bits - 1), np.float32)
    if "weight_zero_point" in tensors:
        packed = np.ascontiguousarray(tensors["weight_zero_point"].numpy().T)
        zeros = _unpack(packed, bits, n).T.astype(np.float32)
    width = group or k
    centred = torch.from_numpy(codes) - torch.from_numpy(zeros).repeat_interleave(width, 1)[:, :k]
    return centred * scale.repeat_interleave(width, 1)[:, :k]


def zero_points(value: QuantizedMatrix) -> Array | None:
    """The integer codes `[N, G]` that stand for zero in an asymmetric matrix; None for a symmetric one.

    Raises ValueError where a minimum is not, to the nearest float16, a whole number of steps below zero that is itself a code.
    """
    if value.minimum is None:
        return None
    scale, minimum = value.scale.astype(np.float32), value.minimum.astype(np.float32)
    zeros = np.rint(np.divide(-minimum, scale, out=np.zeros_like(scale), where=scale != 0))
    inside = (zeros >= 0) & (zeros <= value.grid.high)
    if not (inside & ((-zeros * scale).astype(np.float16) == value.minimum)).all():
        raise ValueError("its minimums are no whole multiples of its scales")
    return zeros.astype(np.uint8)


def _groups(grid: Grid, columns: int) -> int:
    """Scales in a row without those of padding columns."""
    return 1 if grid.group is None else columns // grid.group


def _pack(codes: Array, bits: int) -> Array:
    """Unsigned codes of 4 or 8 bits `[N, K]` in int32 words, the first in the lowest bits; the last word is filled with zeros."""
    per_word = 32 // bits
    padded = np.pad(codes, ((0, 0), (0, -codes.shape[1] % per_word)))
    if bits == 4:
        padded = padded[:, 0::2] | (padded[:, 1::2] << 4)
    return np.ascontiguousarray(padded).view("<i4")


def _unpack(words: Array, bits: int, columns: int) -> Array:
    """The inverse of `_pack`: uint8 `[N, columns]`."""
    data = np.ascontiguousarray(words).view(np.uint8)
    if bits == 4:
        data = np.stack([data & 15, data >> 4], axis=-1).reshape(len(data), -1)
    return data[:, :columns]
