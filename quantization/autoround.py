"""AutoRound: learns by signed gradient descent which way to round each weight, and how far each group's range reaches.

Cheng et al. 2023: q = round(w / s + V), V in [-0.5, 0.5]. They learn from a whole block's outputs; here each matrix learns from its own,
exactly and for all tokens at once, by the second moment of its inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from ..errors import PassError
from ..formats.floats import row_slices
from ..formats.grid import Grid, QuantizedMatrix, stack
from ..formats.round_to_nearest import GroupScales, choose_scales

STEPS: Final = 200
_ROW_VALUES: Final = 1 << 22
_RANGE: Final = 0.5  # how much of a group's range may be given up or added at each end
_LARGEST: Final = 65504.0  # of float16
_TINY: Final = 1e-38


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoRoundRecord:
    """Relative squared errors, |y' - y|^2 / |y|^2, of the outputs before learning, rounded to nearest, and after."""

    loss_before: float
    loss: float
    best_step: int
    """The step that was kept; 0 is rounding to nearest. The last that any row kept, where rows are judged one by one."""


class _Rounding:
    """One matrix's rounding while it is learnt: `offset [N, G, width]` and, in units of a group's range, the `ends [2, N, G, 1]` of it."""

    def __init__(self, w: Tensor, grid: Grid, importance: Tensor | None) -> None:
        self.shape = w.shape
        self.grid = grid
        start = choose_scales(w, grid, importance)
        self.scale = start.scale[..., None]  # [N, G, 1]
        self.minimum = None if start.minimum is None else start.minimum[..., None]
        groups, width = start.scale.shape[1], grid.group or w.shape[1]
        self.w = torch.nn.functional.pad(w, (0, groups * width - w.shape[1])).view(len(w), groups, width)
        self.offset = torch.zeros_like(self.w, requires_grad=True)
        self.ends = torch.zeros(2, *self.scale.shape, requires_grad=True)

    def state(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Float codes `[N, G, width]` and the scales and minimums `[N, G, 1]`, as stored; gradients pass straight through any rounding
        but not to codes that are clamped."""
        low, high = self.ends
        minimum = None
        if self.minimum is None:
            scale = self._exact(self.scale * (1 + high))
        else:
            scale = self._exact(self.scale * (1 + high - low))
            minimum = self._exact(self.minimum + low * self.scale * self.grid.high)
        divisor = torch.where(scale.abs() > _TINY, scale, 1.0)  # a group of one value has scale 0, and 1/0 a gradient of nan
        wanted = (self.w if minimum is None else self.w - minimum) / divisor + self.offset
        codes = (wanted + (wanted.round() - wanted).detach()).clamp(self.grid.low, self.grid.high)
        return codes, scale, minimum

    def values(self) -> Tensor:
        """What the weights would be, float32 `[N, K]`, differentiable in `offset` and `ends`."""
        codes, scale, minimum = self.state()
        return self._flat(codes * scale if minimum is None else codes * scale + minimum)

    @torch.no_grad()
    def matrix(self) -> QuantizedMatrix:
        """The matrix as it would be stored now."""
        codes, scale, minimum = self.state()
        scales = GroupScales(scale=scale[..., 0], minimum=None if minimum is None else minimum[..., 0])
        return scales.matrix(self._flat(codes).round(), self.grid)

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One step of signed gradient descent."""
        for parameter, limit in ((self.offset, 0.5), (self.ends, _RANGE)):
            if parameter.grad is not None:
                parameter.sub_(parameter.grad.sign(), alpha=rate).clamp_(-limit, limit)
                parameter.grad = None

    def _flat(self, grouped: Tensor) -> Tensor:
        return grouped.reshape(len(self.w), -1)[:, : self.shape[1]]

    def _exact(self, value: Tensor) -> Tensor:
        if self.grid.group is None:
            return value
        stored = value.detach().clamp(-_LARGEST, _LARGEST).half().float()
        return value + (stored - value.detach())


def autoround(
    w: Tensor, hessian: Tensor, grid: Grid, *, steps: int = STEPS, damping: float = 0.1
) -> tuple[QuantizedMatrix, AutoRoundRecord]:
    """`w [N, K]` on `grid`, learnt to make tr(dW H dW^T) small for H = `hessian [K, K]`, float32 (`SecondMoment.hessian`).

    Each row keeps its best step. `damping` times the mean of diag(H) is added to the diagonal, so that few samples are not fitted too
    closely. Rows are learnt in blocks, which bounds the memory to some ten times a block of 4M weights. Nothing is random. Raises
    PassError for shapes that do not fit and values that are not finite.
    """
    n, k = w.shape
    if hessian.shape != (k, k):
        raise PassError(f"autoround: H has shape {list(hessian.shape)}, expected [{k}, {k}] for weights of shape [{n}, {k}]")
    _check_steps(steps)
    diagonal = hessian.diagonal()
    mean = diagonal.mean()
    importance = diagonal / mean.clamp_min(_TINY)
    ridge = damping * float(mean)
    parts: list[QuantizedMatrix] = []
    before = after = whole = 0.0
    best_step = 0
    for rows in row_slices(n, k, _ROW_VALUES):
        part = w[rows].float()
        matrix, start, least, last = _learn_rows(part, _Rounding(part, grid, importance), hessian, ridge, steps)
        parts.append(matrix)
        before, after, best_step = before + start, after + least, max(best_step, last)
        whole += float((part * _gradient(part, hessian, ridge)).sum(dtype=torch.float64))
    record = AutoRoundRecord(
        loss_before=before / whole if whole else 0.0, loss=after / whole if whole else 0.0, best_step=best_step
    )
    return stack(parts), record


def _learn_rows(
    w: Tensor, rounding: _Rounding, hessian: Tensor, ridge: float, steps: int
) -> tuple[QuantizedMatrix, float, float, int]:
    """The rows `w [n, K]` at their best steps, their summed loss at the start and at those, and the last step that any row kept."""
    best = rounding.matrix()
    lowest = torch.full((len(w),), torch.inf)
    start = 0.0
    best_step = 0
    for step in range(steps + 1):
        values = rounding.values()
        with torch.no_grad():
            delta = values - w
            gradient = _gradient(delta, hessian, ridge)
            loss = (delta * gradient).sum(1)
            if not loss.isfinite().all():
                raise PassError("autoround: the loss is not finite; check the weights and the calibration inputs of this layer")
            better = loss < lowest
            if step == 0:
                start, lowest = float(loss.sum(dtype=torch.float64)), loss
            elif better.any():
                best, best_step = _choose(better, rounding.matrix(), best), step
                lowest = torch.where(better, loss, lowest)
        if step < steps:
            torch.autograd.backward(values, gradient)  # half the loss's gradient: its signs are what counts
            rounding.step((1 - step / steps) / steps)
    return best, start, float(lowest.sum(dtype=torch.float64)), best_step


def _gradient(delta: Tensor, hessian: Tensor, ridge: float) -> Tensor:
    """`delta [n, K]` times the damped H."""
    return (delta @ hessian).add_(delta, alpha=ridge)


def _choose(better: Tensor, new: QuantizedMatrix, old: QuantizedMatrix) -> QuantizedMatrix:
    """The rows of `new` where `better [n]`, else those of `old`."""
    rows = better.numpy()[:, None]
    minimum = None if new.minimum is None or old.minimum is None else np.where(rows, new.minimum, old.minimum)
    codes, scale = np.where(rows, new.codes, old.codes), np.where(rows, new.scale, old.scale)
    return QuantizedMatrix(grid=new.grid, codes=codes, scale=scale, minimum=minimum)


def _check_steps(steps: int) -> None:
    if steps < 1:
        raise PassError(f"autoround: steps={steps}, expected at least 1")
