"""Packs matrices and vectors into the layouts of `docs/bundle.md`, quantises them, and sizes what kernels pack.

Everything is numpy and works on one matrix `[N, K]` at a time, the quantisers in slices that fit a cache. bfloat16
arrays are `uint16`, as numpy has no such type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Format: TypeAlias = Literal["f32", "bf16", "i8", "i8g", "i4"]
Array: TypeAlias = npt.NDArray[Any]
Float32: TypeAlias = npt.NDArray[np.float32]

BLOCK: Final = 16
"""Rows of a weight block, and the multiple to which vectors are padded."""
COLUMN_ALIGN: Final = 64

_SHRINK: Final = tuple(1.0 - 0.02 * step for step in range(1, 11))
_SLICE_VALUES: Final = 1 << 18


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def num_groups(k: int, group_size: int) -> int:
    """Scales in a row of `k` columns; the last group may be short."""
    return -(-round_up(k, COLUMN_ALIGN) // group_size)


def operand_row_bytes(kind: Format, k: int, group_size: int | None = None) -> int:
    """Bytes of one packed activation row for a linear with weights of `kind` and `k` inputs (`operand.hpp`)."""
    padded = round_up(k, COLUMN_ALIGN)
    if kind == "f32":
        return padded * 4
    if kind == "bf16":
        return padded * 2
    groups = 1 if kind == "i8" or group_size is None else num_groups(k, group_size)
    return round_up(2 * padded + 4 + 8 * groups, 64)


def attention_workspace_bytes(
    max_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    context_length: int,
    threads: int,
) -> int:
    """Bytes of an attention kernel's workspace, the same as `llmc::attention_workspace_bytes` (`attention.hpp`)."""
    chunk, prefill_rows, decode_rows, decode_slots = 128, 32, 8, 256
    width = round_up(head_dim, BLOCK)

    def state(rows: int) -> int:
        return round_up(rows * (width + 2), BLOCK)

    prefill = threads * (prefill_rows * (width + chunk) + 2 * state(prefill_rows))
    decode = threads * decode_rows * (width + chunk) + decode_slots * state(decode_rows)
    decode += max_tokens * num_heads * (width + 2)
    return round_up(4 * max(prefill, decode), 64)


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
    wide: Float32 = (np.asarray(bits, dtype=np.uint32) << np.uint32(16)).view(np.float32)
    return wide


# Quantisers


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


# Packers


def pack_f32(w: Array) -> Float32:
    """`[N, K]` to `[NB, Kp, 16]`."""
    return _to_blocks(np.asarray(w, np.float32), 0)


def pack_bf16(w: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint16]:
    """bfloat16 bits `[N, K]` to `[NB, Kp/2, 16, 2]`."""
    blocks = _to_blocks(_columns_as(w, 0, np.dtype(np.uint32)), 0)
    return blocks.view(np.uint16).reshape(*blocks.shape, 2)


def pack_int8(q: npt.NDArray[np.int8], scale: Float32) -> tuple[npt.NDArray[np.uint8], Float32]:
    """`q [N, K]`, `scale [N]` to data `[NB, Kp/4, 16, 4]`, scale `[NB * 16]`."""
    return _pack_bytes(q), pack_vector(scale)


def pack_int8_groups(
    q: npt.NDArray[np.int8], scale: npt.NDArray[np.float16]
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float16]]:
    """`q [N, K]`, `scale [N, G]` to data `[NB, Kp/4, 16, 4]`, scale `[NB, G, 16]`."""
    return _pack_bytes(q), _to_blocks(np.ascontiguousarray(scale, np.float16), 0)


def pack_int4(q: npt.NDArray[np.int8], scale: npt.NDArray[np.float16]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float16]]:
    """`q [N, K]` in -8..7, `scale [N, G]` to data `[NB, Kp/8, 16, 4]`, scale `[NB, G, 16]`."""
    n, k = q.shape
    padded_k = round_up(k, COLUMN_ALIGN)
    nibbles = np.full((n, padded_k), 8, np.uint8)
    np.add(q, 8, out=nibbles[:, :k], casting="unsafe")
    octets = nibbles.reshape(n, padded_k // 8, 2, 4)
    data = octets[:, :, 0] | (octets[:, :, 1] << np.uint8(4))
    blocks = _to_blocks(data.reshape(n, padded_k // 2).view(np.uint32), np.uint32(0x88888888))
    scales = _to_blocks(np.ascontiguousarray(scale, np.float16), 0)
    return blocks.view(np.uint8).reshape(*blocks.shape, 4), scales


def _pack_bytes(q: npt.NDArray[np.int8]) -> npt.NDArray[np.uint8]:
    offset = q.view(np.uint8) ^ np.uint8(128)  # two's complement + 128
    blocks = _to_blocks(_columns_as(offset, 128, np.dtype(np.uint32)), np.uint32(0x80808080))
    return blocks.view(np.uint8).reshape(*blocks.shape, 4)


def interleave(gate: Array, up: Array) -> Array:
    """Joins two packed tensors of a gate/up pair, block by block; 16 values of a row-scale vector are one block."""
    if gate.ndim == 1:
        return interleave(gate.reshape(-1, BLOCK), up.reshape(-1, BLOCK)).reshape(-1)
    joined: Array = np.stack((gate, up), axis=1).reshape(2 * gate.shape[0], *gate.shape[1:])
    return joined


def pack_vector(v: Array) -> Float32:
    """A norm weight, bias, frequency or row-scale vector, padded with zeros to a multiple of 16."""
    padded = np.zeros(round_up(v.shape[0], BLOCK), np.float32)
    padded[: v.shape[0]] = v
    return padded


def _columns_as(w: Array, fill: int, word: np.dtype[Any]) -> Array:
    """Pads the columns of `[N, K]` with `fill` and views neighbours as one `word`."""
    n, k = w.shape
    padded_k = round_up(k, COLUMN_ALIGN)
    if padded_k != k:
        padded = np.full((n, padded_k), fill, w.dtype)
        padded[:, :k] = w
        w = padded
    return np.ascontiguousarray(w).view(word)


def _to_blocks(w: Array, fill: Any) -> Array:
    """`[N, C]` to `[NB, C, 16]`, rows padded with `fill`; 4-byte elements are padded to 64 columns first."""
    n, columns = w.shape
    width = round_up(columns, COLUMN_ALIGN) if w.dtype == np.float32 else columns
    out = np.empty((-(-n // BLOCK), width, BLOCK), w.dtype)
    whole = n // BLOCK
    out[:whole, :columns] = w[: whole * BLOCK].reshape(whole, BLOCK, columns).transpose(0, 2, 1)
    if whole * BLOCK != n:
        out[whole] = fill
        out[whole, :columns, : n - whole * BLOCK] = w[whole * BLOCK :].T
    out[:, columns:] = fill
    return out


# Unpackers, for tests and inspection


def unpack(kind: Format, data: Array, scale: Array | None, n: int, k: int, group_size: int | None = None) -> Float32:
    """The matrix `[N, K]` that a packed one stands for."""
    if kind == "f32":
        return _from_blocks(data, n, k)
    if kind == "bf16":
        return from_bf16(_from_words(data, n, np.dtype(np.uint16))[:, :k])
    assert scale is not None, f"format {kind} has scales"
    words = _from_words(data, n, np.dtype(np.uint8))
    if kind == "i8":
        return (words[:, :k].astype(np.float32) - 128) * scale[:n, None]
    assert group_size is not None, f"format {kind} has a group size"
    offset = 128
    if kind == "i4":
        octets, offset = words.reshape(n, -1, 1, 4), 8
        words = np.concatenate((octets & np.uint8(15), octets >> np.uint8(4)), axis=2).reshape(n, -1)
    scales = _from_blocks(scale, n, scale.shape[1]).astype(np.float32)
    return (words[:, :k].astype(np.float32) - offset) * np.repeat(scales, group_size, axis=1)[:, :k]


def deinterleave(packed: Array) -> tuple[Array, Array]:
    """The two halves of a gate/up pair."""
    if packed.ndim == 1:
        gate, up = deinterleave(packed.reshape(-1, BLOCK))
        return gate.reshape(-1), up.reshape(-1)
    return packed[0::2], packed[1::2]


def _from_blocks(blocks: Array, n: int, columns: int) -> Array:
    """`[NB, C, 16]` to `[n, columns]`."""
    rows = blocks.transpose(0, 2, 1).reshape(-1, blocks.shape[1])
    return np.ascontiguousarray(rows[:n, :columns])


def _from_words(data: Array, n: int, element: np.dtype[Any]) -> Array:
    """`[NB, C, 16, per word]` to `[n, C * per word]`."""
    rows = np.ascontiguousarray(data).transpose(0, 2, 1, 3).reshape(-1, data.shape[1] * data.shape[3])
    return np.ascontiguousarray(rows[:n], dtype=element)
