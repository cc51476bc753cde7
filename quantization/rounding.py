"""Rounds one matrix by the method asked for, and measures what is lost on inputs that the method has not seen."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..formats.grid import Grid, QuantizedMatrix
from ..formats.round_to_nearest import round_to_nearest
from .autoround import autoround
from .gptq import gptq
from .method import Rounding
from .second_moment import SecondMoment

_SAMPLED_ROWS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundingNotes:
    """What GPTQ met: how often damping was raised, to what share of the mean diagonal, and whether that was in vain."""

    damping_retries: int = 0
    damping: float = 0.0
    fell_back: bool = False


def round_matrix(w: Tensor, grid: Grid, rounding: Rounding, moment: SecondMoment) -> tuple[QuantizedMatrix, RoundingNotes]:
    """`w [N, K]`, float32, on `grid`, given the statistics of its inputs."""
    if rounding == "gptq":
        matrix, record = gptq(w, moment.hessian(), grid)
        return matrix, RoundingNotes(damping_retries=record.retries, damping=record.damping, fell_back=record.fell_back)
    if rounding == "autoround":
        return autoround(w, moment.hessian(), grid)[0], RoundingNotes()
    importance = moment.importance if rounding == "opt-rtn" else None
    return round_to_nearest(w, grid, importance), RoundingNotes()


def output_losses(w: Tensor, matrix: QuantizedMatrix, inputs: Iterable[Tensor]) -> tuple[float, float]:
    """Relative squared errors of a linear's outputs, |x dW|^2 / |x W|^2 over `inputs [T, K]`: of `matrix`, and of plain rounding of `w`.

    On at most 512 rows of the matrix, evenly spaced.
    """
    rows = torch.linspace(0, len(w) - 1, min(len(w), _SAMPLED_ROWS)).round().long()
    sample = w[rows]
    found = torch.from_numpy(_rows(matrix, rows).dequantize()) - sample
    plain = torch.from_numpy(round_to_nearest(sample, matrix.grid).dequantize()) - sample
    sums = torch.zeros(3, dtype=torch.float64)
    for x in inputs:
        for index, values in enumerate((found, plain, sample)):
            sums[index] += (x @ values.T).square().sum()
    whole = float(sums[2].clamp_min(1e-30))
    return float(sums[0]) / whole, float(sums[1]) / whole


def _rows(matrix: QuantizedMatrix, rows: Tensor) -> QuantizedMatrix:
    index = rows.numpy()
    minimum = None if matrix.minimum is None else matrix.minimum[index]
    return QuantizedMatrix(grid=matrix.grid, codes=matrix.codes[index], scale=matrix.scale[index], minimum=minimum)
