"""Rounds matrices to stored number formats: bf16, fp8, and symmetric integers with a scale for each row or group of columns.

Everything is numpy on one float32 matrix `[N, K]` at a time, in slices that fit a cache. bfloat16 arrays are `uint16` and fp8 arrays
`uint8`, as numpy has no such types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
Float32: TypeAlias = npt.NDArray[np.float32]

COLUMN_ALIGN: Final = 64
"""The multiple to which columns are padded before they are divided into groups."""

_SHRINK: Final = tuple(1.0 - 0.02 * step for step in range(1, 11))
_SLICE_VALUES: Final = 1 << 18


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple that is at least `value`."""
    return -(-value // multiple) * multiple


def num_groups(k: int, group_size: int) -> int:
    """Scales in a row of `k` columns; the last group may be short."""
    return -(-round_up(k, COLUMN_ALIGN) // group_size)


def to_bf16(x: npt.ArrayLike) -> npt.NDArray[np.uint16]:
    """float32 to bfloat16 bits, to nearest even; NaN stays NaN."""
    values = np.ascontiguousarray(x, dtype=np.float32)
    out = np.empty(values.shape, np.uint16)
    source, target = values.reshape(-1), out.reshape(-1)
    for start in range(0, source.size, _SLICE_VALUES):
        part = source[start : start + _SLICE_VALUES]
        bits = part.view(np.uint32)
        rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
        nan = np.isnan(part)
        if nan.any():
            rounded[nan] = bits[nan] | np.uint32(0x400000)
        target[start : start + _SLICE_VALUES] = rounded >> np.uint32(16)
    return out


def from_bf16(bits: npt.ArrayLike) -> Float32:
    """bfloat16 bits to float32."""
    wide: Float32 = (np.asarray(bits, dtype=np.uint32) << np.uint32(16)).view(np.float32)
    return wide


def quantize_int8(w: Array) -> tuple[npt.NDArray[np.int8], Float32]:
    """Symmetric, one scale for each row: `w[n, k] ~ q[n, k] * scale[n]`, q in -127..127."""
    n, k = w.shape
    q = np.empty((n, k), np.int8)
    scale = np.empty(n, np.float32)
    for rows in _row_slices(n, k):
        part = np.asarray(w[rows], np.float32)
        scale[rows] = _largest(part) / np.float32(127)
        q[rows] = _round(part, scale[rows], -127, 127)
    return q, scale


def quantize_int8_groups(w: Array, group_size: int) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float16]]:
    """Symmetric, one scale for each group of columns: `w ~ q * scale[n, k // group_size]`, q in -127..127."""

    def quantize(groups: Float32) -> tuple[Float32, npt.NDArray[np.float16]]:
        scale = (_largest(groups) / np.float32(127)).astype(np.float16)
        return _round(groups, scale, -127, 127), scale

    return _by_group(w, group_size, quantize)


def quantize_int4(w: Array, group_size: int, *, search: bool = False) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float16]]:
    """Symmetric, one scale for each group of columns: `w ~ q * scale[n, k // group_size]`, q in -8..7.

    The scale is signed so that the weight of largest magnitude becomes -8, as in ggml's Q4_0: all 16 levels are used.
    `search` tries smaller scales, which clip that weight, and keeps the least squared error of each group.
    """

    def quantize(groups: Float32) -> tuple[Float32, npt.NDArray[np.float16]]:
        high, low = groups.max(axis=1), groups.min(axis=1)
        scale = np.where(high > -low, high, low) / np.float32(-8)
        best_scale = scale.astype(np.float16)
        best = _round(groups, best_scale, -8, 7)
        if not search:
            return best, best_scale
        error = _squared_error(groups, best, best_scale)
        for factor in _SHRINK:
            candidate = (scale * np.float32(factor)).astype(np.float16)
            q = _round(groups, candidate, -8, 7)
            candidate_error = _squared_error(groups, q, candidate)
            better = candidate_error < error
            best[better], best_scale[better], error[better] = q[better], candidate[better], candidate_error[better]
        return best, best_scale

    return _by_group(w, group_size, quantize)


def _by_group(
    w: Array, group_size: int, quantize: Callable[[Float32], tuple[Float32, npt.NDArray[np.float16]]]
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float16]]:
    """Applies `quantize` to the groups as rows. Columns are padded with zeros to whole groups; q keeps only the first K."""
    n, k = w.shape
    groups = num_groups(k, group_size)
    q = np.empty((n, k), np.int8)
    scale = np.empty((n, groups), np.float16)
    for rows in _row_slices(n, k):
        part = np.asarray(w[rows], np.float32)
        if part.shape[1] != groups * group_size:
            part = np.pad(part, ((0, 0), (0, groups * group_size - k)))
        values, scales = quantize(part.reshape(-1, group_size))
        q[rows] = values.reshape(part.shape)[:, :k]
        scale[rows] = scales.reshape(-1, groups)
    return q, scale


def _largest(w: Float32) -> Float32:
    """Largest magnitude of each row."""
    largest: Float32 = np.maximum(w.max(axis=1), -w.min(axis=1))
    return largest


def _round(w: Float32, scale: Array, low: int, high: int) -> Float32:
    wide = scale.astype(np.float32)
    inverse = np.divide(np.float32(1), wide, out=np.zeros_like(wide), where=np.abs(wide) > 1e-38)
    q = w * inverse[:, None]
    np.rint(q, out=q)
    np.clip(q, low, high, out=q)
    rounded: Float32 = q
    return rounded


def _squared_error(w: Float32, q: Float32, scale: Array) -> Float32:
    difference = q * scale.astype(np.float32)[:, None]
    difference -= w
    error: Float32 = np.einsum("nk,nk->n", difference, difference)
    return error


def _row_slices(n: int, k: int) -> Iterator[slice]:
    rows = max(1, _SLICE_VALUES // max(k, 1))
    return (slice(start, min(start + rows, n)) for start in range(0, n, rows))


def quantize_fp8(w: Array, *, fnuz: bool) -> tuple[npt.NDArray[np.uint8], Float32]:
    """E4M3 bits with one scale for each row: `w[n, k] ~ e4m3(bits[n, k]) * scale[n]` (Micikevicius et al. 2022).

    `fnuz` is the variant without infinities and negative zero that AMD's CDNA 3 computes with; its largest value is 240, not 448.
    """
    import torch  # numpy has no 8-bit floats

    dtype, largest = (torch.float8_e4m3fnuz, 240.0) if fnuz else (torch.float8_e4m3fn, 448.0)
    n, k = w.shape
    bits = np.empty((n, k), np.uint8)
    scale = np.empty(n, np.float32)
    for rows in _row_slices(n, k):
        part = np.asarray(w[rows], np.float32)
        scale[rows] = np.maximum(_largest(part), np.float32(1e-30)) / np.float32(largest)
        scaled = np.clip(part / scale[rows][:, None], -largest, largest)
        bits[rows] = torch.from_numpy(scaled).to(dtype).view(torch.uint8).numpy()
    return bits, scale


def from_fp8(bits: npt.NDArray[np.uint8], *, fnuz: bool) -> Float32:
    """E4M3 bits to float32."""
    import torch

    dtype = torch.float8_e4m3fnuz if fnuz else torch.float8_e4m3fn
    values: Float32 = torch.from_numpy(np.ascontiguousarray(bits)).view(dtype).to(torch.float32).numpy()
    return values
