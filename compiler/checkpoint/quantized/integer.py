"""Integer weights with scales and zero points, and the grid on which they can be kept."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ....formats.floats import Array, Float32, round_up, row_slices
from ....formats.grid import BITS, GROUP_SIZES, Grid, QuantizedMatrix
from .base import QuantizedWeight, StoredKind
from .module import Module

OUT_OF_RANGE = "out of float16's range"
_TOLERANCE = 2.0**-11  # half a unit in the last place of float16


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupParameters:
    """What turns unsigned codes `[N, columns]` into weights `(code - zero) * scale`.

    `scale` (float32) and `zero` (int16) are `[N, G]`; column k uses group `k // group`, or `column_group[k]` where that is given.
    `group` is None where the row has one scale.
    """

    bits: int
    columns: int
    group: int | None
    scale: Float32
    zero: npt.NDArray[np.int16]
    column_group: Array | None = None

    @property
    def symmetric(self) -> bool:
        """Whether every zero is the middle code."""
        return bool((self.zero == 1 << (self.bits - 1)).all())


@dataclass(frozen=True, slots=True, kw_only=True)
class GridFit:
    """The grid that holds a matrix and its scales on it, or only the reason why there is none."""

    kind: StoredKind
    grid: Grid | None = None
    scale: Array | None = None
    minimum: npt.NDArray[np.float16] | None = None

    def matrix(self, codes: npt.NDArray[np.uint8]) -> QuantizedMatrix | None:
        """The matrix of unsigned `codes [N, K]`."""
        if self.grid is None or self.scale is None:
            return None
        stored: Array = codes
        if self.grid.symmetric:
            stored = (
                (codes ^ np.uint8(128)).view(np.int8) if self.grid.bits == 8 else codes.view(np.int8) - np.int8(-self.grid.low)
            )
        return QuantizedMatrix(grid=self.grid, codes=stored, scale=self.scale, minimum=self.minimum)


def fit_grid(parameters: GroupParameters) -> GridFit:
    """Find the grid for these scales and zeros.

    Groups wider than a grid's repeat their scale. Scales that float16 does not hold, and minimums (`-zero * scale`), are rounded to
    it, which moves a weight by less than another rounding of its code would; where they leave float16's range, there is no fit.
    """
    p = parameters
    width = f"groups of {p.group}" if p.group else "one group a row"
    stored = f"{p.bits} bits in {width}, {'symmetric' if p.symmetric else 'asymmetric'}"

    def kind(kept_as: str | None, remark: str = "") -> StoredKind:
        return StoredKind(stored=stored, bits=p.bits, group=p.group, kept_as=kept_as, remark=remark)

    if p.bits not in BITS:
        return GridFit(kind=kind(None, f"no grid has {p.bits} bits"))
    if p.column_group is not None:
        return GridFit(kind=kind(None, "columns are in act order, so neighbours do not share a scale"))
    whole_row = p.group is None or (p.group >= p.columns and p.group not in GROUP_SIZES)
    if whole_row and p.bits == 8 and p.symmetric:
        grid = Grid(bits=8)
        return GridFit(kind=kind(str(grid)), grid=grid, scale=np.ascontiguousarray(p.scale[:, :1]))
    source = round_up(p.columns, 128) if whole_row or p.group is None else p.group
    group = next((size for size in reversed(GROUP_SIZES) if source % size == 0), None)
    if group is None:
        return GridFit(kind=kind(None, f"no grid has groups of {source}"))
    grid = Grid(bits=p.bits, group=group, symmetric=p.symmetric)
    groups, repeat = grid.num_groups(p.columns), source // group
    scale = round_scales(_spread(p.scale, repeat, groups))
    with np.errstate(over="ignore"):  # beyond float32 is beyond float16
        minimum = None if grid.symmetric else round_scales(_spread(-p.zero.astype(np.float32) * p.scale, repeat, groups))
    if scale is None or (minimum is None and not grid.symmetric):
        return GridFit(kind=kind(None, f"scales or minimums {OUT_OF_RANGE}"))
    rounded = [name for name, half in (("scales", scale), ("minimums", minimum)) if half is not None and not half[1]]
    remark = f"{' and '.join(rounded)} rounded to float16, by at most 2^-11 of the largest" if rounded else ""
    return GridFit(kind=kind(str(grid), remark), grid=grid, scale=scale[0], minimum=minimum and minimum[0])


def _spread(values: Float32, repeat: int, groups: int) -> Float32:
    """`[N, G]`, each repeated, cut or padded with zeros to `groups`: columns past the last are not there."""
    spread = np.repeat(values, repeat, axis=1)[:, :groups]
    padded: Float32 = np.pad(spread, ((0, 0), (0, groups - spread.shape[1])))
    return padded


def round_scales(values: Float32) -> tuple[npt.NDArray[np.float16], bool] | None:
    """Finite values in float16 and whether that is exact; None where it overflows or loses more than 2^-11 of the largest."""
    with np.errstate(over="ignore"):
        half = values.astype(np.float16)
    if not np.isfinite(half).all():
        return None
    error, largest = np.abs(half.astype(np.float32) - values).max(), np.abs(values).max()
    return None if error > _TOLERANCE * largest else (half, bool(error == 0))


class IntegerWeight(QuantizedWeight):
    """A weight of integer codes; formats differ in where its parts lie."""

    def __init__(self, module: Module, bits: int, shape: tuple[int, int]) -> None:
        self.module = module
        self.bits = bits
        self.shape = shape
        self.stored_type = f"INT{bits}"

    @abstractmethod
    def parameters(self) -> GroupParameters:
        """Scales and zeros."""

    @abstractmethod
    def codes(self) -> npt.NDArray[np.uint8]:
        """Codes `[N, K]`, from 0 to 2^bits - 1."""

    def kind(self) -> StoredKind:
        return fit_grid(self.parameters()).kind

    def matrix(self) -> QuantizedMatrix | None:
        fit = fit_grid(self.parameters())
        return None if fit.grid is None else fit.matrix(self.codes())

    def dequantize(self) -> Float32:
        p, codes = self.parameters(), self.codes()
        groups = p.column_group
        if groups is None:
            groups = np.arange(p.columns) // (p.group or p.columns)
        out = np.empty(codes.shape, np.float32)
        for rows in row_slices(*codes.shape):
            part = codes[rows].astype(np.float32)
            part -= p.zero[rows][:, groups]
            with np.errstate(over="ignore"):  # who reads weights looks for infinities
                part *= p.scale[rows][:, groups]
            out[rows] = part
        return out
