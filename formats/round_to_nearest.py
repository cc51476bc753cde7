"""Round-to-nearest, with a search for the scale of each group that loses least, optionally weighted by what the inputs are like."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from .floats import Array, round_up, row_slices
from .grid import COLUMN_ALIGN, Grid, QuantizedMatrix

_SLICE_VALUES: Final = 1 << 21
_SHRINK: Final = tuple(1.0 - 0.025 * step for step in range(13))  # of the scale that covers a group's range
_LARGEST: Final = 65504.0  # of float16
_TINY: Final = 1e-38


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupScales:
    """Scales `[N, G]`, float32 values that are exact in the grid's scale type, and minimums likewise for an asymmetric grid."""

    scale: Tensor
    minimum: Tensor | None = None

    def codes(self, w: Tensor, groups: Tensor | int, grid: Grid) -> Tensor:
        """The nearest codes, as floats, of columns `w [N, C]` that belong to `groups` (one, or an index for each of the C)."""
        scale = self.scale[:, groups].reshape(len(w), -1)
        minimum = 0.0 if self.minimum is None else self.minimum[:, groups].reshape(len(w), -1)
        return _round(w - minimum, scale, grid)

    def values(self, codes: Tensor, groups: Tensor | int) -> Tensor:
        """What `codes [N, C]` stand for."""
        values = codes * self.scale[:, groups].reshape(len(codes), -1)
        return values if self.minimum is None else values + self.minimum[:, groups].reshape(len(codes), -1)

    def matrix(self, codes: Tensor, grid: Grid) -> QuantizedMatrix:
        """The quantised matrix of float `codes [N, K]`."""
        return QuantizedMatrix(
            grid=grid,
            codes=codes.to(torch.int8 if grid.symmetric else torch.uint8).numpy(),
            scale=self.scale.to(torch.float32 if grid.group is None else torch.float16).numpy(),
            minimum=None if self.minimum is None else self.minimum.to(torch.float16).numpy(),
        )


def choose_scales(w: Tensor, grid: Grid, importance: Tensor | None = None, *, search: bool | None = None) -> GroupScales:
    """Scales for `w [N, K]`, float32, that lose least squared error in each group.

    `importance [K]` (or `[N, K]`) weighs the error of each column, usually with the mean square of its input. Without `search`, a scale
    covers its group's range; by default 8 bits, which would gain nothing, do without. Zero groups get the scale 0 and come back as zeros.
    """
    search = grid.bits < 8 if search is None else search
    n, k = w.shape
    width = grid.group or k
    columns = round_up(k, COLUMN_ALIGN) if grid.group is not None else k
    columns = round_up(columns, width)
    scale = torch.empty(n, columns // width)
    minimum = None if grid.symmetric else torch.empty_like(scale)
    for rows in row_slices(n, k, _SLICE_VALUES):
        part = _grouped(w[rows].float(), columns, width)
        weight = None
        if importance is not None:
            here = importance[rows] if importance.dim() == 2 else importance.expand(part.shape[0], k)
            weight = _grouped(here.float().clamp_min(1e-12), columns, width)
        elif columns != k:  # the zeros that fill up the last group do not count
            weight = _grouped(torch.ones(part.shape[0], k), columns, width)
        fitted = _fit(part, weight, grid, search)
        scale[rows] = fitted.scale
        if minimum is not None and fitted.minimum is not None:
            minimum[rows] = fitted.minimum
    return GroupScales(scale=scale, minimum=minimum)


def round_to_nearest(
    w: Tensor | Array, grid: Grid, importance: Tensor | None = None, *, search: bool | None = None
) -> QuantizedMatrix:
    """`w [N, K]` on `grid`; see `choose_scales`."""
    values = torch.from_numpy(np.ascontiguousarray(w, np.float32)) if isinstance(w, np.ndarray) else w.float()
    n, k = values.shape
    scales = choose_scales(values, grid, importance, search=search)
    groups = torch.arange(k) // (grid.group or k)
    codes = torch.empty(n, k, dtype=torch.int8 if grid.symmetric else torch.uint8)
    for rows in row_slices(n, k, _SLICE_VALUES):
        minimum = None if scales.minimum is None else scales.minimum[rows]
        part = GroupScales(scale=scales.scale[rows], minimum=minimum)
        codes[rows] = part.codes(values[rows], groups, grid).to(codes.dtype)
    return scales.matrix(codes, grid)


def _grouped(w: Tensor, columns: int, width: int) -> Tensor:
    """`[N, K]` to `[N, G, width]`, padded with zeros."""
    return torch.nn.functional.pad(w, (0, columns - w.shape[1])).view(len(w), -1, width)


def _fit(w: Tensor, weight: Tensor | None, grid: Grid, search: bool) -> GroupScales:
    """Scales (and minimums) of groups `w [N, G, width]`: of every candidate the one with the least error."""
    best: GroupScales | None = None
    best_error = torch.empty(0)
    for candidate in _candidates(w, weight, grid, search):
        centred = w if candidate.minimum is None else w - candidate.minimum[..., None]
        codes = _round(centred, candidate.scale[..., None], grid)
        loss = (codes * candidate.scale[..., None] - centred).square_()
        error = (loss if weight is None else loss.mul_(weight)).sum(-1)
        if best is None:
            best, best_error = candidate, error
            continue
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best.scale[better] = candidate.scale[better]
        if best.minimum is not None and candidate.minimum is not None:
            best.minimum[better] = candidate.minimum[better]
    assert best is not None
    return best


def _candidates(w: Tensor, weight: Tensor | None, grid: Grid, search: bool) -> Iterator[GroupScales]:
    """Scales that cover the range or clip it a little, each also refined by least squares for the codes it gives."""
    high, low = w.amax(-1), w.amin(-1)
    for factor in _SHRINK if search else (1.0,):
        if grid.symmetric:
            largest = torch.where(high > -low, high, low)
            start = largest.abs() / 127 if grid.bits == 8 else largest / grid.low
            scales = GroupScales(scale=_exact(start * factor, grid))
        else:
            middle, half = (high + low) / 2, (high - low) / 2 * factor
            minimum = _exact(middle - half, grid)
            scales = GroupScales(scale=_exact(2 * half / grid.high, grid), minimum=minimum)
        yield scales
        if search:
            yield _refine(w, weight, scales, grid)


def _refine(w: Tensor, weight: Tensor | None, scales: GroupScales, grid: Grid) -> GroupScales:
    """The least-squares scale (and minimum) for the codes that `scales` give."""
    h = torch.ones_like(w) if weight is None else weight
    if scales.minimum is None:
        codes = _round(w, scales.scale[..., None], grid)
        h_codes = h * codes
        norm = (h_codes * codes).sum(-1)
        scale = torch.where(norm > _TINY, (h_codes * w).sum(-1) / norm.clamp_min(_TINY), scales.scale)
        return GroupScales(scale=_exact(scale, grid))
    codes = _round(w - scales.minimum[..., None], scales.scale[..., None], grid)
    total, mean_code, mean_w = h.sum(-1), (h * codes).sum(-1), (h * w).sum(-1)
    spread = total * (h * codes * codes).sum(-1) - mean_code.square()
    slope = (total * (h * codes * w).sum(-1) - mean_code * mean_w) / spread.clamp_min(_TINY)
    fits = (spread > _TINY) & (slope > 0)
    scale = torch.where(fits, slope, scales.scale)
    minimum = torch.where(fits, (mean_w - scale * mean_code) / total, scales.minimum)
    return GroupScales(scale=_exact(scale, grid), minimum=_exact(minimum, grid))


def _exact(value: Tensor, grid: Grid) -> Tensor:
    """The value as its stored type holds it."""
    if grid.group is None:
        return value.clone()
    return value.clamp(-_LARGEST, _LARGEST).half().float()


def _round(w: Tensor, scale: Tensor, grid: Grid) -> Tensor:
    inverse = torch.where(scale.abs() > _TINY, 1.0 / scale, torch.zeros_like(scale))
    return (w * inverse).round_().clamp_(grid.low, grid.high)
