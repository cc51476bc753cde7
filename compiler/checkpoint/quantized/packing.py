"""Unpacks codes of 1 to 8 bits from 32-bit words."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ....formats.floats import Array, row_slices


def unpack(words: Array, bits: int, count: int) -> npt.NDArray[np.uint8]:
    """`words [R, W]`, 32-bit, to codes `[R, count]`: code i of a row lies at its bits `i * bits` and up, lowest first."""
    data = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)  # [R, 4 * W]
    if bits == 8:
        return data[:, :count]
    rows = len(data)
    codes = np.empty((rows, -(-count // 8), 8), np.uint8)
    if bits == 4:
        pairs = codes.reshape(rows, -1)[:, :count]
        pairs[:, 0::2] = data[:, : -(-count // 2)] & np.uint8(15)
        pairs[:, 1::2] = data[:, : count // 2] >> np.uint8(4)
        return pairs
    for part in row_slices(rows, count):
        octets = np.zeros(codes[part].shape[:2], np.uint64)  # eight codes are so many bytes as a code has bits
        for i in range(bits):
            column = data[part, i : codes.shape[1] * bits : bits]
            octets[:, : column.shape[1]] |= column.astype(np.uint64) << np.uint64(8 * i)
        for i in range(8):
            codes[part, :, i] = (octets >> np.uint64(bits * i)).astype(np.uint8) & np.uint8((1 << bits) - 1)
    return codes.reshape(rows, -1)[:, :count]


def unpack_words(words: Array, bits: int, count: int) -> npt.NDArray[np.uint8]:
    """Likewise where no code crosses a word: each word holds `32 // bits` codes and leaves its high bits unused."""
    each = 32 // bits
    rows, width = words.shape
    codes = np.empty((rows, width, each), np.uint8)
    unsigned = words.view(np.uint32)
    for i in range(each):
        codes[:, :, i] = (unsigned >> np.uint32(i * bits)) & np.uint32((1 << bits) - 1)
    return codes.reshape(rows, -1)[:, :count]
