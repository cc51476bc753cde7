"""AutoRound: learns by signed gradient descent which way to round each weight, and how far each group's range reaches.

Cheng et al. 2023: q = round(w / s + V), V in [-0.5, 0.5]. The loss is a layer's own (`autoround`, from the second moment of its inputs)
or that of a whole block's outputs (`autoround_block`, several matrices at once).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch
from torch import Tensor

from ..errors import PassError
from .grid import Grid, QuantizedMatrix
from .number_formats import row_slices
from .round_to_nearest import GroupScales, choose_scales

Block: TypeAlias = Callable[[Mapping[str, Tensor], int], Tensor]
"""The output of a block with the given weights, by name, on minibatch number i; differentiable in the weights."""

STEPS: Final = 200
_ROW_VALUES: Final = 1 << 22
_RANGE: Final = 0.5  # how much of a group's range may be given up or added at each end
_CHECKS: Final = 20  # evaluations of a block on all minibatches
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
    """One matrix's rounding while it is learnt: `offset [N, K]` and, in units of a group's range, `ends [N, G, 2]`, low and high."""

    def __init__(self, w: Tensor, grid: Grid, importance: Tensor | None) -> None:
        self.w = w
        self.grid = grid
        start = choose_scales(w, grid, importance)
        self.scale = start.scale
        self.minimum = start.minimum
        self.offset = torch.zeros_like(w, requires_grad=True)
        self.ends = torch.zeros(*start.scale.shape, 2, requires_grad=True)
        self.groups = torch.arange(w.shape[1]) // (grid.group or w.shape[1])

    @property
    def parameters(self) -> list[Tensor]:
        return [self.offset, self.ends]

    def scales(self) -> GroupScales:
        """With the ends as they are, exact in the stored type; gradients pass straight through its rounding."""
        low, high = self.ends.unbind(-1)
        if self.minimum is None:
            return GroupScales(scale=self._exact(self.scale * (1 + high)))
        scale = self._exact(self.scale * (1 + high - low))
        return GroupScales(scale=scale, minimum=self._exact(self.minimum + low * self.scale * self.grid.high))

    def codes(self, scales: GroupScales) -> Tensor:
        """Float codes `[N, K]`; gradients pass straight through the rounding of those that are not clamped."""
        scale = scales.scale[:, self.groups]
        inverse = torch.where(scale.abs() > _TINY, 1.0 / scale, torch.zeros_like(scale))
        centred = self.w if scales.minimum is None else self.w - scales.minimum[:, self.groups]
        wanted = centred * inverse + self.offset
        return (wanted + (wanted.detach().round() - wanted.detach())).clamp(self.grid.low, self.grid.high)

    def values(self) -> Tensor:
        """What the weights would be, float32 `[N, K]`, differentiable in the parameters."""
        scales = self.scales()
        return scales.values(self.codes(scales), self.groups)

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One step of signed gradient descent."""
        for parameter, limit in ((self.offset, 0.5), (self.ends, _RANGE)):
            if parameter.grad is not None:
                parameter.sub_(parameter.grad.sign(), alpha=rate).clamp_(-limit, limit)
                parameter.grad = None

    def _exact(self, value: Tensor) -> Tensor:
        if self.grid.group is None:
            return value
        stored = value.detach().clamp(-_LARGEST, _LARGEST).half().float()
        return value + (stored - value.detach())
