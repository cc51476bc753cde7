"""The block types of GGUF: which grids they hold exactly, and how matrices become their bytes."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from ...formats.floats import Array, to_bf16
from ...formats.grid import Grid, QuantizedMatrix
from ...formats.round_to_nearest import round_to_nearest
from .k_quants import K_QUANTS, SUPER_BLOCK, quantize_k

BLOCK: Final = 32
FLOATS: Final = ("F32", "F16", "BF16")
BLOCK_GRIDS: Final[dict[str, Grid]] = {  # blocks that hold any matrix on this grid, code for code
    "Q4_0": Grid(bits=4, group=BLOCK),
    "Q4_1": Grid(bits=4, group=BLOCK, symmetric=False),
    "Q5_0": Grid(bits=5, group=BLOCK),
    "Q5_1": Grid(bits=5, group=BLOCK, symmetric=False),
    "Q8_0": Grid(bits=8, group=BLOCK),
}
MATRIX_TYPES: Final = (*BLOCK_GRIDS, *K_QUANTS, *FLOATS)


def exact_type(grid: Grid, columns: int) -> str | None:
    """The smallest block type that holds every matrix of so many columns on `grid` without a change; None if no type does.

    Wider groups repeat their scale for each block of 32; codes of fewer bits are codes of more bits too.
    """
    if grid.group is None or columns % BLOCK:
        return None
    for name, block in BLOCK_GRIDS.items():
        if block.symmetric == grid.symmetric and block.bits >= grid.bits:
            return name
    return None


def pack_exact(value: QuantizedMatrix, type_name: str) -> npt.NDArray[np.uint8]:
    """The blocks of a matrix on a grid that `type_name` holds: uint8 `[N, K / 32 * block bytes]`."""
    n, k = value.shape
    grid = BLOCK_GRIDS[type_name]
    repeats = (value.grid.group or k) // BLOCK
    blocks = k // BLOCK
    parts: list[Array] = [_halves(value.scale, repeats, blocks)]
    if value.minimum is not None:
        parts.append(_halves(value.minimum, repeats, blocks))
    codes = value.codes.reshape(n, blocks, BLOCK)
    if type_name == "Q8_0":
        parts.append(codes.view(np.uint8))
    else:
        offset = (1 << (grid.bits - 1)) if grid.symmetric else 0
        unsigned = (codes.astype(np.int16) + offset).astype(np.uint8)
        if grid.bits == 5:  # bit j of 32 is the high bit of code j
            parts.append(np.packbits(unsigned >> 4, axis=-1, bitorder="little"))
        low = unsigned & 15  # code j and code j + 16 share a byte
        parts.append(low[..., : BLOCK // 2] | (low[..., BLOCK // 2 :] << 4))
    return np.concatenate(parts, axis=-1).reshape(n, -1)


def pack_codes_with_rounded_scale(value: QuantizedMatrix) -> npt.NDArray[np.uint8]:
    """Q8_0 blocks of 8-bit codes with a float32 scale a row: the codes stay, the scale is rounded to float16."""
    n, k = value.shape
    grid = Grid(bits=8, group=BLOCK)
    scale = np.broadcast_to(value.scale.astype(np.float16), (n, grid.num_groups(k))).copy()
    return pack_exact(QuantizedMatrix(grid=grid, codes=value.codes, scale=scale), "Q8_0")


def pack_floats(w: torch.Tensor, type_name: str) -> Array:
    """A tensor as float32, float16 or bfloat16 (as uint8 rows of bytes), each to nearest."""
    if type_name == "BF16":
        bits = to_bf16(w.float().numpy())
        return bits.view(np.uint8).reshape(*bits.shape[:-1], -1)
    return w.to({"F32": torch.float32, "F16": torch.float16}[type_name]).numpy()


def quantize(w: torch.Tensor, type_name: str, importance: torch.Tensor | None = None) -> npt.NDArray[np.uint8]:
    """A float matrix `[N, K]` as blocks, with scales that lose least; K is a multiple of the type's block."""
    if type_name in K_QUANTS:
        return quantize_k(w, type_name, importance)
    return pack_exact(round_to_nearest(w, BLOCK_GRIDS[type_name], importance), type_name)


def block_columns(type_name: str) -> int:
    """Columns in a block; a row is a whole number of blocks."""
    return SUPER_BLOCK if type_name in K_QUANTS else 1 if type_name in FLOATS else BLOCK


def _halves(values: npt.NDArray[np.float16], repeats: int, blocks: int) -> npt.NDArray[np.uint8]:
    """Scales `[N, G]` as the two bytes `[N, blocks, 2]` of each block."""
    each = np.repeat(values.astype(np.float16), repeats, axis=1)[:, :blocks]
    return np.ascontiguousarray(each).view(np.uint8).reshape(len(each), blocks, 2)
