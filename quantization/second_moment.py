"""What a linear layer's inputs are like: their second moment and, for each channel, mean and largest magnitude."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from ..errors import PassError

_BLOCK: Final = 512


class SecondMoment:
    """Running statistics of inputs `[T, width]` of any floating-point type; each `update` is one sample.

    Holds one float32 `[width, width]` matrix, of which updates touch the upper half, unless `diagonal_only`; the rest are vectors.
    """

    def __init__(self, width: int, *, name: str = "inputs", diagonal_only: bool = False) -> None:
        """`name` is what errors call these inputs."""
        self.width = width
        self.name = name
        self.tokens = 0
        self.samples = 0
        self.mean_abs = torch.zeros(width)
        self.importance = torch.zeros(width)
        """Mean of x^2, float32 `[width]`: how much an error of a column of weights matters."""
        self.half_amax = torch.zeros(2, width)
        """Largest |x| `[2, width]` among the samples of even and of odd number; a fair calibration set makes them alike."""
        self._matrix = None if diagonal_only else torch.zeros(width, width)

    @property
    def amax(self) -> Tensor:
        """Largest |x|, float32 `[width]`."""
        return self.half_amax.amax(0)

    def update(self, x: Tensor) -> None:
        """Adds one sample `[T, width]`; raises PassError for another width and for values that are not finite."""
        if x.dim() != 2 or x.shape[1] != self.width:
            raise PassError(f"{self.name}: calibration inputs have shape {list(x.shape)}, expected [tokens, {self.width}]")
        if not len(x):
            return
        x = x.detach().float()
        magnitude = x.abs()
        amax = magnitude.amax(0)
        if not amax.isfinite().all():
            channel = int(amax.isfinite().logical_not().nonzero()[0])
            raise PassError(
                f"{self.name}: calibration input of channel {channel} is not finite; check the layers before it, or run them in float32"
            )
        kept, share = self.tokens / (self.tokens + len(x)), 1.0 / (self.tokens + len(x))
        self.mean_abs.mul_(kept).add_(magnitude.sum(0), alpha=share)
        self.importance.mul_(kept).add_(magnitude.square_().sum(0), alpha=share)
        torch.maximum(self.half_amax[self.samples % 2], amax, out=self.half_amax[self.samples % 2])
        if self._matrix is not None:
            for start in range(0, self.width, _BLOCK):  # the upper triangle, block row by block row: half the work
                block = self._matrix[start : start + _BLOCK, start:]
                block.addmm_(x[:, start : start + _BLOCK].T, x[:, start:], beta=kept, alpha=2 * share)
        self.tokens += len(x)
        self.samples += 1

    def hessian(self) -> Tensor:
        """H = 2/tokens * sum of x x^T, float32 `[width, width]`: of the squared error of a layer's output, for one row of weights.

        The statistics' own storage, not a copy. Raises PassError if there is none or nothing was seen.
        """
        if self._matrix is None:
            raise PassError(f"{self.name}: only the diagonal of the second moment was kept; calibrate with the whole matrix")
        if not self.tokens:
            raise PassError(
                f"{self.name}: no calibration input reached this layer; give samples that use it, or round to nearest"
            )
        for start in range(0, self.width, _BLOCK):  # mirrors the upper half
            stop = min(start + _BLOCK, self.width)
            square = self._matrix[start:stop, start:stop]
            square.copy_(square.triu() + square.triu(1).T)
            self._matrix[stop:, start:stop] = self._matrix[start:stop, stop:].T
        return self._matrix
