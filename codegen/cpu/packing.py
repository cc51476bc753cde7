"""Packs matrices and vectors into the CPU layouts of `docs/bundle.md`, and sizes what kernels pack.

Everything is numpy and works on one matrix `[N, K]` at a time.
"""

from __future__ import annotations

from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from ...quantization.grid import COLUMN_ALIGN, num_groups
from ...quantization.number_formats import Array, Float32, from_bf16, round_up

Format: TypeAlias = Literal["f32", "bf16", "i8", "i8g", "i4"]

BLOCK: Final = 16
"""Rows of a weight block, and the multiple to which vectors are padded."""


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
