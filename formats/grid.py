"""Integer grids: how many bits, how many columns share a scale, with or without a minimum; and matrices on them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from .floats import Array, Float32, Fp8Matrix, round_up, row_slices

COLUMN_ALIGN: Final = 64
"""The multiple to which columns are padded before they are divided into groups."""
GROUP_SIZES: Final = (32, 64, 128)
BITS: Final = (3, 4, 5, 6, 8)

_NAME = re.compile(r"int(3|4|5|6|8)(?:-g(32|64|128)(-asym)?)?")


def num_groups(k: int, group: int) -> int:
    """Scales in a row of `k` columns; the last group may be short."""
    return -(-round_up(k, COLUMN_ALIGN) // group)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The values a weight may take: `code * scale`, or `code * scale + minimum` where the grid is asymmetric.

    `group` columns of a row share a float16 scale (and minimum); None is one float32 scale a row, for 8 bits alone. Symmetric codes
    are `low..high` = -2^(bits-1)..2^(bits-1)-1 with a scale of either sign, so that the weight of largest magnitude may be the lowest
    code; 8 bits use -127..127. Asymmetric codes are 0..2^bits-1.
    """

    bits: int
    group: int | None = None
    symmetric: bool = True

    def __post_init__(self) -> None:
        if self.bits not in BITS or (self.group is not None and self.group not in GROUP_SIZES):
            raise ValueError(f"no grid of {self.bits} bits with groups of {self.group}")
        if self.group is None and (self.bits != 8 or not self.symmetric):
            raise ValueError(f"a grid of {self.bits} bits needs groups; one scale a row is for symmetric 8 bits")

    @classmethod
    def parse(cls, name: str) -> Grid | None:
        """The grid of a format name (`int8`, `int4-g32`, `int4-g128-asym`, `w8a8`, `w4a16-g64`); None if it has none."""
        name = name.replace("w4a16", "int4") if name.startswith("w4a16") else "int8" if name == "w8a8" else name
        match = _NAME.fullmatch(name)
        if match is None or (match[2] is None and match[1] != "8"):
            return None
        return cls(bits=int(match[1]), group=int(match[2]) if match[2] else None, symmetric=match[3] is None)

    def __str__(self) -> str:
        group = f"-g{self.group}" if self.group else ""
        return f"int{self.bits}{group}{'' if self.symmetric else '-asym'}"

    @property
    def low(self) -> int:
        """The lowest code."""
        return 0 if not self.symmetric else -127 if self.bits == 8 else -(1 << (self.bits - 1))

    @property
    def high(self) -> int:
        """The highest code."""
        return (1 << self.bits) - 1 if not self.symmetric else (1 << (self.bits - 1)) - 1

    def num_groups(self, k: int) -> int:
        """Scales in a row of `k` columns."""
        return 1 if self.group is None else num_groups(k, self.group)

    def num_bytes(self, n: int, k: int) -> int:
        """Bytes of codes, scales and minimums of `[n, k]`, without any layout's padding."""
        scales = n * self.num_groups(k) * (4 if self.group is None else 2 if self.symmetric else 4)
        return -(-n * k * self.bits // 8) + scales


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedMatrix:
    """A matrix `[N, K]` on a grid with G groups a row.

    `codes` `[N, K]`, int8, for an asymmetric grid uint8; `scale` `[N, G]`, float16, or float32 `[N, 1]` for a scale a row; `minimum`
    float16 `[N, G]`, for an asymmetric grid alone. Raises ValueError where these do not fit together.
    """

    grid: Grid
    codes: npt.NDArray[np.int8] | npt.NDArray[np.uint8]
    scale: Array
    minimum: npt.NDArray[np.float16] | None = None

    def __post_init__(self) -> None:
        n, k = self.codes.shape
        expected = (n, self.grid.num_groups(k))
        if self.scale.shape != expected or (self.minimum is not None and self.minimum.shape != expected):
            raise ValueError(
                f"{self.grid}: scales have shape {self.scale.shape}, expected {expected} for codes {self.codes.shape}"
            )
        types = (self.codes.dtype, self.scale.dtype, None if self.minimum is None else self.minimum.dtype)
        wanted = (
            np.dtype(np.int8 if self.grid.symmetric else np.uint8),
            np.dtype(np.float32 if self.grid.group is None else np.float16),
            None if self.grid.symmetric else np.dtype(np.float16),
        )
        if types != wanted:
            raise ValueError(f"{self.grid}: types are {types}, expected {wanted}")

    @property
    def shape(self) -> tuple[int, int]:
        """`(N, K)`."""
        n, k = self.codes.shape
        return n, k

    def rows(self, start: int, stop: int) -> QuantizedMatrix:
        """Rows `start` to `stop` as a matrix of their own; a view."""
        part = slice(start, stop)
        minimum = None if self.minimum is None else self.minimum[part]
        return QuantizedMatrix(grid=self.grid, codes=self.codes[part], scale=self.scale[part], minimum=minimum)

    def dequantize(self) -> Float32:
        """The float32 values `[N, K]`."""
        n, k = self.shape
        out = np.empty((n, k), np.float32)
        width = self.grid.group or k
        for rows in row_slices(n, k):
            part = self.codes[rows].astype(np.float32)
            part *= np.repeat(self.scale[rows].astype(np.float32), width, axis=1)[:, :k]
            if self.minimum is not None:
                part += np.repeat(self.minimum[rows].astype(np.float32), width, axis=1)[:, :k]
            out[rows] = part
        return out


MatrixValue: TypeAlias = "Array | QuantizedMatrix | Fp8Matrix"
"""A matrix for a packer: float32, to be rounded to nearest on the way, or already in its format."""


def stack(parts: list[QuantizedMatrix]) -> QuantizedMatrix:
    """The rows of all parts, which are on one grid."""
    first = parts[0]
    if len(parts) == 1:
        return first
    minimums = [part.minimum for part in parts if part.minimum is not None]
    return QuantizedMatrix(
        grid=first.grid,
        codes=np.concatenate([part.codes for part in parts]),
        scale=np.concatenate([part.scale for part in parts]),
        minimum=np.concatenate(minimums) if minimums else None,
    )
