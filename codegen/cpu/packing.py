"""Packs matrices and vectors into the CPU layouts of `docs/bundle.md`, and sizes what kernels pack.

Everything is numpy and works on one matrix `[N, K]` at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from ...formats.floats import Array, Float32, from_bf16, round_up
from ...formats.grid import COLUMN_ALIGN, num_groups

Format: TypeAlias = Literal["f32", "f16", "bf16", "i8", "i8g", "i3", "i4", "i5", "i6", "i3a", "i4a", "i5a", "i6a", "i8a"]
"""The kernels' names (`config.hpp`)."""

BLOCK: Final = 16
"""Rows of a weight block, and the multiple to which vectors are padded."""
_QUADS: Final = 8  # of 4 columns, in a unit of 32
_PLANES: Final = {8: (8,), 6: (4, 2), 5: (4, 1), 4: (4,), 3: (2, 1)}  # widths, from the lowest bits up
_SLICE_VALUES: Final = 1 << 18


def operand_row_bytes(kind: Format, k: int, group_size: int | None = None) -> int:
    """Bytes of one packed activation row for a linear with weights of `kind` and `k` inputs (`operand.hpp`)."""
    padded = round_up(k, COLUMN_ALIGN)
    if kind in ("f32", "f16"):
        return padded * 4
    if kind == "bf16":
        return padded * 2
    groups = 1 if kind == "i8" or group_size is None else num_groups(k, group_size)
    return round_up(2 * padded + 4 + 8 * groups, 64)


# Packers


def pack_f32(w: Array) -> Float32:
    """`[N, K]` to `[NB, Kp, 16]`."""
    return _to_blocks(np.asarray(w, np.float32), round_up(w.shape[1], COLUMN_ALIGN))


def pack_f16(w: Array) -> npt.NDArray[np.float16]:
    """`[N, K]` to `[NB, Kp, 16]`, to nearest even; what float16 cannot reach becomes its largest value."""
    largest = np.finfo(np.float16).max
    return _to_blocks(np.clip(w, -largest, largest).astype(np.float16), round_up(w.shape[1], COLUMN_ALIGN))


def pack_bf16(w: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint16]:
    """bfloat16 bits `[N, K]` to `[NB, Kp/2, 16, 2]`."""
    n, k = w.shape
    padded = np.zeros((n, round_up(k, COLUMN_ALIGN)), np.uint16)
    padded[:, :k] = w
    blocks = _to_blocks(padded.view(np.uint32), padded.shape[1] // 2)
    return blocks.view(np.uint16).reshape(*blocks.shape, 2)


def pack_codes(codes: npt.NDArray[np.uint8], bits: int, fill: int) -> npt.NDArray[np.uint8]:
    """Codes `[N, K]`, below `2^bits`, to the bit planes `[NB, Kp*bits/32, 16, 4]`; `fill` is the code of the padding."""
    n, k = codes.shape
    columns = round_up(k, COLUMN_ALIGN)
    out = np.empty((-(-n // BLOCK), columns * bits // 32, BLOCK), np.uint32)
    for rows in _block_slices(n, columns):
        padded = np.full((round_up(rows.stop - rows.start, BLOCK), columns), fill, np.uint8)
        padded[: rows.stop - rows.start, :k] = codes[rows]
        words = _to_planes(padded.view(np.uint32).reshape(-1, _QUADS), bits)
        blocks = slice(rows.start // BLOCK, -(-rows.stop // BLOCK))
        out[blocks] = words.reshape(-1, BLOCK, out.shape[1]).transpose(0, 2, 1)
    return out.view(np.uint8).reshape(*out.shape, 4)


def pack_scales(scale: npt.NDArray[np.float16], minimum: npt.NDArray[np.float16] | None = None) -> npt.NDArray[np.float16]:
    """`[N, G]` to `[NB, G, 16]`; with minimums, both to `[NB, G, 2, 16]`."""
    n, groups = scale.shape
    if minimum is None:
        return _to_blocks(scale, groups)
    both = np.stack((scale, minimum), axis=2).reshape(n, 2 * groups)
    return _to_blocks(both, 2 * groups).reshape(-1, groups, 2, BLOCK)


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


def _to_blocks(w: Array, width: int) -> Array:
    """`[N, C]` to `[NB, width, 16]`, rows and columns padded with zeros."""
    n, columns = w.shape
    out = np.empty((-(-n // BLOCK), width, BLOCK), w.dtype)
    whole = n // BLOCK
    out[:whole, :columns] = w[: whole * BLOCK].reshape(whole, BLOCK, columns).transpose(0, 2, 1)
    if whole * BLOCK != n:
        out[whole] = 0
        out[whole, :columns, : n - whole * BLOCK] = w[whole * BLOCK :].T
    out[:, columns:] = 0
    return out


def _block_slices(n: int, k: int) -> Iterator[slice]:
    """Slices of rows that fit a cache, whole blocks but for the last."""
    rows = round_up(max(1, _SLICE_VALUES // max(k, 1)), BLOCK)
    return (slice(start, min(start + rows, n)) for start in range(0, n, rows))


def _to_planes(quads: npt.NDArray[np.uint32], bits: int) -> npt.NDArray[np.uint32]:
    """Units `[U, 8 quads]`, a word four codes, to the words of their bit planes `[U, bits]`."""
    if bits == 8:
        return quads
    words = np.zeros((len(quads), bits), np.uint32)
    for first, width, q in _pieces(bits):
        piece = (quads[:, q] >> np.uint32(first)) & _every_byte(width)
        words[:, first + q * width // 8] |= piece << np.uint32(q * width % 8)
    return words


def _from_planes(words: npt.NDArray[np.uint32], bits: int) -> npt.NDArray[np.uint32]:
    """The inverse of `_to_planes`."""
    if bits == 8:
        return words
    quads = np.zeros((len(words), _QUADS), np.uint32)
    for first, width, q in _pieces(bits):
        piece = words[:, first + q * width // 8] >> np.uint32(q * width % 8)
        quads[:, q] |= (piece & _every_byte(width)) << np.uint32(first)
    return quads


def _pieces(bits: int) -> Iterator[tuple[int, int, int]]:
    """`(first bit, width, quad)` of all that one shift moves. A plane's first bit is also its first word in a unit."""
    first = 0
    for width in _PLANES[bits]:
        yield from ((first, width, q) for q in range(_QUADS))
        first += width


def _every_byte(width: int) -> np.uint32:
    mask: np.uint32 = np.uint32(((1 << width) - 1) * 0x01010101)
    return mask


# Unpackers


def unpack_float(data: Array, n: int, k: int) -> Float32:
    """The matrix `[n, k]` of `pack_f32` or `pack_f16`."""
    return _from_blocks(data, n, k).astype(np.float32)


def unpack_bf16(data: npt.NDArray[np.uint16], n: int, k: int) -> Float32:
    """The matrix `[n, k]` of `pack_bf16`."""
    words = np.ascontiguousarray(data).view(np.uint32)[..., 0]
    return from_bf16(_from_blocks(words, n, words.shape[1]).view(np.uint16)[:, :k])


def unpack_codes(data: npt.NDArray[np.uint8], bits: int, n: int, k: int) -> npt.NDArray[np.uint8]:
    """The codes `[n, k]` of `pack_codes`."""
    blocks = np.ascontiguousarray(data).view(np.uint32)[..., 0]  # [NB, words, 16]
    out = np.empty((n, k), np.uint8)
    for rows in _block_slices(n, k):
        part = blocks[rows.start // BLOCK : -(-rows.stop // BLOCK)]
        words = np.ascontiguousarray(part.transpose(0, 2, 1)).reshape(-1, bits)
        codes = _from_planes(words, bits).view(np.uint8).reshape(part.shape[0] * BLOCK, -1)
        out[rows] = codes[: rows.stop - rows.start, :k]
    return out


def unpack_scales(packed: npt.NDArray[np.float16], n: int) -> npt.NDArray[np.float16]:
    """The scales `[n, G]` of `pack_scales`; with minimums, both as `[n, G, 2]`."""
    flat = packed.reshape(packed.shape[0], -1, BLOCK)
    rows = _from_blocks(flat, n, flat.shape[1])
    return rows.reshape(n, *packed.shape[1:-1])


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
