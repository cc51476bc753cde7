"""GPTQ: rounds a matrix column by column so that later columns make up for the errors of earlier ones, then descends code by code.

Frantar et al. 2022, with scales fixed beforehand and columns in order of activation, in the form of Chen et al. 2025 ("The geometry of
LLM quantization: GPTQ as Babai's nearest plane algorithm"): with H = R^T R the error of a row is |R (w - q)|^2, and the last unknown of
a triangular system is rounded first. The codes are those of the original, but H is never inverted: one Cholesky factor is all it takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from ..errors import PassError
from ..formats.floats import row_slices
from ..formats.grid import Grid, QuantizedMatrix
from ..formats.round_to_nearest import GroupScales, choose_scales

Order: TypeAlias = Literal["static-act", "natural"]

_ROW_VALUES: Final = 1 << 22  # of a block of rows, twice of which are at hand at a time
_MIN_ROWS: Final = 512
_RETRIES: Final = 3
_FLOAT64_COLUMNS: Final = 4096  # up to which a factor that fails in float32 is tried in float64
_SAMPLED_ROWS: Final = 1024
_TINY: Final = 1e-38
_LARGEST: Final = 65504.0  # of float16


@dataclass(frozen=True, slots=True, kw_only=True)
class GptqRecord:
    """How a matrix was quantised. Losses are tr(dW H dW^T) / tr(W H W^T), over at most 1,024 evenly spaced rows; nan if H holds nan."""

    damping: float
    """Share of the mean of diag(H) that was added to it."""
    retries: int
    """How often the damping was raised tenfold because H had no Cholesky factor."""
    fell_back: bool
    """No damping gave a factor: the matrix is rounded to nearest."""
    dead_columns: int
    """Columns whose input was always zero; their weights are taken to be zero."""
    loss: float
    rtn_loss: float
    """Of rounding to nearest on the same grid, with scales weighted by diag(H)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Problem:
    """What all rows share. Columns of `factor` are in `order`, of which the last is rounded first."""

    hessian: Tensor  # [K, K], undamped
    damped: Tensor  # [K], diagonal of the damped H
    dead: Tensor  # [K], bool
    order: Tensor  # [K]
    factor: Tensor  # [K, K], unit upper triangular: R with its rows divided by its diagonal
    importance: Tensor  # [K], mean 1
    group: Tensor  # [K], of each column
    grid: Grid


def gptq(
    w: Tensor,
    hessian: Tensor,
    grid: Grid,
    *,
    damping: float = 0.1,
    block: int = 128,
    order: Order = "static-act",
    sweeps: int = 2,
) -> tuple[QuantizedMatrix, GptqRecord]:
    """`w [N, K]` on `grid` so that tr(dW H dW^T) is small, for H = `hessian [K, K]`, float32 (`SecondMoment.hessian`), left as it is.

    Scales come from the original groups, so that columns may be rounded in order of falling diag(H) (`static-act`) and no index is
    needed at run time. `sweeps` then go over all columns, refit each group's scale (and minimum) by least squares under H and move
    single codes to where the others want them, which lowers the loss towards a local minimum. `damping` is a share of the mean of
    diag(H): the paper's 0.01 makes H positive definite, 0.1 also keeps codes from fitting the samples rather than what they stand for.
    Memory beyond the arguments and the result: one `[K, K]` and a few blocks of rows. Raises PassError for shapes that do not fit and
    values that are not finite.
    """
    n, k = w.shape
    if hessian.shape != (k, k):
        raise PassError(f"gptq: H has shape {list(hessian.shape)}, expected [{k}, {k}] for weights of shape [{n}, {k}]")
    if order not in get_args(Order) or damping <= 0 or block < 1 or sweeps < 0:
        raise PassError(
            f"gptq: order={order!r}, damping={damping}, block={block}, sweeps={sweeps}; expected order one of "
            f"{', '.join(get_args(Order))}, damping and block above 0, sweeps at least 0"
        )
    problem, used, retries = _prepare(hessian, grid, damping, order)
    dead = hessian.diagonal() == 0
    codes = torch.empty(n, k, dtype=torch.int8 if grid.symmetric else torch.uint8)
    scale = torch.empty(n, grid.num_groups(k))
    minimum = None if grid.symmetric else torch.empty_like(scale)
    for rows in row_slices(n, k, max(_ROW_VALUES, _MIN_ROWS * k)):
        part = w[rows].float().masked_fill(dead, 0.0)
        if not part.isfinite().all():
            row = rows.start + int(part.isfinite().all(1).logical_not().nonzero()[0])
            raise PassError(f"gptq: row {row} of the weights holds values that are not finite; check the checkpoint")
        scales, found = _nearest(part, hessian, grid) if problem is None else _quantize_rows(part, problem, block, sweeps)
        codes[rows], scale[rows] = found.to(codes.dtype), scales.scale
        if minimum is not None and scales.minimum is not None:
            minimum[rows] = scales.minimum
    scales = GroupScales(scale=scale, minimum=minimum)
    loss, rtn_loss = _losses(w, codes, scales, hessian, grid)
    record = GptqRecord(
        damping=used, retries=retries, fell_back=problem is None, dead_columns=int(dead.sum()), loss=loss, rtn_loss=rtn_loss
    )
    return scales.matrix(codes, grid), record


def _prepare(hessian: Tensor, grid: Grid, damping: float, order: Order) -> tuple[_Problem | None, float, int]:
    """The problem, or None if no damping up to 10^retries times what was asked for gives a factor; the damping used; and the retries."""
    k = len(hessian)
    diagonal = hessian.diagonal()
    mean = float(diagonal.mean(dtype=torch.float64))
    # ascending, since the last column is rounded first
    permutation = torch.argsort(diagonal, stable=True) if order == "static-act" else torch.arange(k).flip(0)
    for retries in range(_RETRIES + 1):
        used = damping * 10**retries
        damped = torch.where(diagonal == 0, 1.0, diagonal + used * mean)
        factor = _cholesky(hessian, damped, permutation)
        if factor is not None:
            break
    else:
        return None, used, retries
    root = factor.diagonal().clone()
    factor /= root[:, None]
    importance = torch.empty(k)
    # An error of rounding costs R_jj^2 once later columns have made up for it, and H_jj if they could not: between the two.
    importance[permutation] = root * damped[permutation].sqrt()
    importance.masked_fill_(diagonal == 0, 0.0)
    problem = _Problem(
        hessian=hessian,
        damped=damped,
        dead=diagonal == 0,
        order=permutation,
        factor=factor,
        importance=importance / importance.mean().clamp_min(_TINY),
        group=torch.arange(k) // (grid.group or k),
        grid=grid,
    )
    return problem, used, retries


def _cholesky(hessian: Tensor, damped: Tensor, permutation: Tensor) -> Tensor | None:
    """Upper triangular R with R^T R = H in the permutation's order, with another diagonal; None if there is none in float32 or float64."""
    k = len(hessian)
    for dtype in (torch.float32, torch.float64)[: 2 if k <= _FLOAT64_COLUMNS else 1]:
        factor = torch.empty(k, k, dtype=dtype)
        for rows in row_slices(k, k):
            factor[rows] = hessian[permutation[rows]][:, permutation]
        factor.diagonal().copy_(damped[permutation])
        info = torch.empty((), dtype=torch.int32)
        torch.linalg.cholesky_ex(factor.mT, out=(factor.mT, info))  # in place, as the transpose is in LAPACK's order
        root = factor.diagonal()
        if not info and bool((root.isfinite() & (root > 0)).all()):
            return factor.float()
    return None


def _quantize_rows(w: Tensor, problem: _Problem, block: int, sweeps: int) -> tuple[GroupScales, Tensor]:
    """Scales and codes, as floats, of the rows `w [n, K]`."""
    scales = choose_scales(w, problem.grid, problem.importance)
    values = w.T.contiguous()  # [K, n]: a column is contiguous
    codes = torch.empty_like(values)
    scale = scales.scale.T.contiguous()
    minimum = torch.zeros_like(scale) if scales.minimum is None else scales.minimum.T.contiguous()
    errors = _round_columns(values, codes, scale, minimum, problem, block)
    for _ in range(sweeps):
        _sweep(errors, codes, scale, minimum, problem, block)
    scales = GroupScales(scale=scale.T.contiguous(), minimum=None if scales.minimum is None else minimum.T.contiguous())
    return scales, codes.T


def _round_columns(w: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor, problem: _Problem, block: int) -> Tensor:
    """Fills `codes [K, n]` for weights `w [K, n]`, and returns the errors w - q `[K, n]`."""
    grid, order, factor = problem.grid, problem.order, problem.factor
    inverse = _inverse(scale)
    groups = problem.group[order].tolist()
    columns = order.tolist()
    errors = w[order]
    for stop in range(len(w), 0, -block):
        start = max(0, stop - block)
        target = torch.addmm(errors[start:stop], factor[start:stop, stop:], errors[stop:])  # [block, n]
        for row in range(stop - 1, start - 1, -1):
            group, code = groups[row], codes[columns[row]]
            torch.sub(target[row - start], minimum[group], out=code)
            code.mul_(inverse[group]).round_().clamp_(grid.low, grid.high)
            errors[row].sub_(minimum[group]).addcmul_(code, scale[group], value=-1)
            target[: row - start].addr_(factor[start:row, row], errors[row])
    w[order] = errors  # in the caller's order, and in its storage
    return w


def _sweep(errors: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor, problem: _Problem, block: int) -> None:
    """Coordinate descent on the damped loss over all scales, minimums and codes, once; changes the first four in place."""
    grid, hessian, k = problem.grid, problem.hessian, len(errors)
    dead = problem.dead.tolist()
    width = grid.group or block
    block = max(block // width, 1) * width
    for start in range(0, k, block):
        stop = min(start + block, k)
        square = hessian[start:stop, start:stop].clone()  # [block, block]
        extra = (problem.damped[start:stop] - square.diagonal()).masked_fill(problem.dead[start:stop], 0.0)
        square.diagonal().add_(extra)
        gradient = torch.addcmul(hessian[start:stop] @ errors, extra[:, None], errors[start:stop])  # [block, n]
        for first in range(start, stop, width):
            last, group = min(first + width, stop), int(problem.group[first])
            if grid.group is not None:
                here = slice(first - start, last - start)
                change = _refit(gradient, codes[first:last], scale[group], minimum[group], square[:, here], here, grid)
                errors[first:last].sub_(change)
            step = _inverse(scale[group])
            for row in range(first, last):
                at = row - start
                if dead[row]:
                    continue
                shift = torch.mul(gradient[at], step).div_(square[at, at])  # to the best code with all others as they are
                shift.add_(codes[row]).round_().clamp_(grid.low, grid.high).sub_(codes[row])
                codes[row].add_(shift)
                shift.mul_(scale[group])
                errors[row].sub_(shift)
                gradient[at + 1 :].addr_(square[at + 1 :, at], shift, alpha=-1)


def _refit(gradient: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor, square: Tensor, here: slice, grid: Grid) -> Tensor:
    """Least-squares scale (and minimum) `[n]` of one group, in place, with what that adds to its values `[width, n]`.

    `square [block, width]` are the damped H's columns of the group, rows `here` of the block; `gradient [block, n]` is kept up to date.
    """
    response = square @ codes  # [block, n]
    norm = (codes * response[here]).sum(0)
    slope = (codes * gradient[here]).sum(0)
    if grid.symmetric:
        wanted = scale + slope / norm.clamp_min(_TINY)
        fitted = torch.where(norm > _TINY, wanted.clamp_(-_LARGEST, _LARGEST).half().float(), scale)
        change = codes * (fitted - scale)
        gradient.addcmul_(response, fitted - scale, value=-1)
        scale.copy_(fitted)
        return change
    ones = square.sum(1)  # [block]: the response to a minimum of 1
    total, both, offset = ones[here].sum(), (codes * ones[here, None]).sum(0), gradient[here].sum(0)
    determinant = norm * total - both.square()
    wanted = (scale + (slope * total - offset * both) / determinant.clamp_min(_TINY)).clamp_(-_LARGEST, _LARGEST).half().float()
    fits = (determinant > 1e-6 * norm * total) & (wanted > 0)
    fitted = torch.where(fits, wanted, scale)
    moved = (minimum + (offset - (fitted - scale) * both) / total.clamp_min(_TINY)).clamp_(-_LARGEST, _LARGEST).half().float()
    gradient.addcmul_(response, fitted - scale, value=-1).addr_(ones, moved - minimum, alpha=-1)
    change = codes * (fitted - scale) + (moved - minimum)
    scale.copy_(fitted)
    minimum.copy_(moved)
    return change


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale.abs() > _TINY, 1.0 / scale, torch.zeros_like(scale))


def _nearest(w: Tensor, hessian: Tensor, grid: Grid) -> tuple[GroupScales, Tensor]:
    """Scales weighted by diag(H), and the nearest codes, as floats."""
    diagonal = hessian.diagonal()
    importance = diagonal / diagonal.mean().clamp_min(_TINY) if bool(diagonal.isfinite().all()) else None
    scales = choose_scales(w, grid, importance)
    return scales, scales.codes(w, torch.arange(w.shape[1]) // (grid.group or w.shape[1]), grid)


def _losses(w: Tensor, codes: Tensor, scales: GroupScales, hessian: Tensor, grid: Grid) -> tuple[float, float]:
    """The relative losses of `codes` with `scales`, and of the nearest codes."""
    n, k = w.shape
    rows = torch.linspace(0, n - 1, min(n, _SAMPLED_ROWS)).round().long()
    groups = torch.arange(k) // (grid.group or k)
    sample = w[rows].float().masked_fill(hessian.diagonal() == 0, 0.0)
    chosen = GroupScales(scale=scales.scale[rows], minimum=None if scales.minimum is None else scales.minimum[rows])
    nearest_scales, nearest = _nearest(sample, hessian, grid)
    whole = float(((sample @ hessian) * sample).sum(dtype=torch.float64))
    losses = []
    for delta in (sample - chosen.values(codes[rows].float(), groups), sample - nearest_scales.values(nearest, groups)):
        loss = float(((delta @ hessian) * delta).sum(dtype=torch.float64))
        losses.append(loss / whole if whole else 0.0)
    return losses[0], losses[1]
