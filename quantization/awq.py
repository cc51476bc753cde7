"""AWQ: scales that protect the weights which meet large activations (Lin et al. 2023).

Their search for limits of what is left to round is that of `opt-rtn`, which follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..formats.floats import row_slices
from ..formats.grid import Grid
from ..formats.round_to_nearest import round_to_nearest

RATIOS: Final = tuple(step / 20 for step in range(20))

_SAMPLE_ROWS: Final = 256  # of a weight decide, or as many more
_SAMPLE_WORK: Final = 1 << 33  # as this many multiply-adds a candidate allow
_LIMIT: Final = 1e4  # a scale lies in 1/_LIMIT.._LIMIT before it is centred
_SLICE_VALUES: Final = 1 << 21


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumer:
    """A linear that reads the scaled value: `weight [N, K]`, float32, and the grid it is rounded to."""

    weight: Tensor
    grid: Grid


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleSearch:
    """The scale found, float32 `[K]`; `ratio` is the r it comes from, None for the identity; losses without and with it."""

    scale: Tensor
    ratio: float | None
    loss_before: float
    loss_after: float

    @property
    def spread(self) -> float:
        """s_max / s_min."""
        return float(self.scale.max() / self.scale.min())


def search_scales(
    mean_abs: Tensor,
    second_moment: Tensor,
    consumers: Sequence[Consumer],
    *,
    tie: Callable[[Tensor], Tensor] | None = None,
    sample_rows: int | None = None,
) -> ScaleSearch:
    """The scale `s = mean|x|^r / (mean|w|^(1-r) + 1e-4)` whose r, of a grid of 20, loses least once the weights are rounded.

    `mean_abs [K]` is the mean magnitude of each input channel and `second_moment [K, K]` the mean of x^T x, both of the unscaled input
    and float32. `tie` makes a scale one that the producer can absorb (`AbsorbPair.tie`). The loss is the error of the consumers' outputs
    by the second moment, on `sample_rows` rows of each, evenly spaced (default: 256, and more of narrow weights). The identity is a
    candidate and wins ties. Channels that are always zero, or that no weight reads, keep the scale 1.
    """
    measure = _output_loss(second_moment, consumers, sample_rows or max(_SAMPLE_ROWS, _SAMPLE_WORK // len(mean_abs) ** 2))
    w_mean = _mean_magnitude(consumers)
    best = torch.ones_like(mean_abs)
    ratio, before = None, measure(best)
    after = before
    for candidate in RATIOS:
        scale = scale_at(candidate, mean_abs, w_mean)
        scale = scale if tie is None else tie(scale)
        error = measure(scale)
        if error < after:
            best, ratio, after = scale, candidate, error
    return ScaleSearch(scale=best, ratio=ratio, loss_before=before, loss_after=after)


def scale_at(ratio: float, x_mean: Tensor, w_mean: Tensor) -> Tensor:
    """The scale `[K]` of one r, centred so that s_max * s_min = 1; 1 where a mean is zero or not finite."""
    alive = (x_mean > 0) & (w_mean > 0) & torch.isfinite(x_mean) & torch.isfinite(w_mean)
    scale = torch.ones_like(x_mean)
    if bool(alive.any()):
        raw = x_mean[alive].double().pow(ratio) / (w_mean[alive].double().pow(1 - ratio) + 1e-4)
        raw = raw.clamp(1 / _LIMIT, _LIMIT)
        scale[alive] = (raw / (raw.max() * raw.min()).sqrt()).to(scale.dtype)
    return scale


def _output_loss(second_moment: Tensor, consumers: Sequence[Consumer], sample_rows: int) -> Callable[[Tensor], float]:
    """`loss(scale)`: the mean square error of all consumers' outputs, tr(dW H dW^T) over the rows, with dW = Q(W s) / s - W."""
    samples = [_spaced(consumer.weight, sample_rows) for consumer in consumers]
    mean_square = second_moment.diagonal()

    def loss(scale: Tensor) -> float:
        error = 0.0
        importance = mean_square / scale.square()
        for consumer, sample in zip(consumers, samples, strict=True):
            rounded = round_to_nearest(sample * scale, consumer.grid, importance).dequantize()
            difference = torch.from_numpy(rounded) / scale - sample
            share = len(consumer.weight) / len(sample)
            error += share * float(((difference @ second_moment) * difference).sum(dtype=torch.float64))
        return error / sum(len(consumer.weight) for consumer in consumers)

    return loss


def _spaced(weight: Tensor, rows: int) -> Tensor:
    if len(weight) <= rows:
        return weight
    return weight[torch.linspace(0, len(weight) - 1, rows).round().long()]


def _mean_magnitude(consumers: Sequence[Consumer]) -> Tensor:
    """`[K]`: the mean over all rows of a weight's magnitude relative to the largest of its group."""
    total = torch.zeros(consumers[0].weight.shape[1], dtype=torch.float64)
    for consumer in consumers:
        n, k = consumer.weight.shape
        width = consumer.grid.group or k
        for rows in row_slices(n, k, _SLICE_VALUES):
            magnitude = _groups(consumer.weight[rows].abs(), width)  # [n, G, width]
            magnitude = magnitude / magnitude.amax(-1, keepdim=True).clamp_min(1e-30)
            total += magnitude.flatten(1)[:, :k].sum(0, dtype=torch.float64)
    return (total / sum(len(consumer.weight) for consumer in consumers)).float()


def _groups(w: Tensor, width: int) -> Tensor:
    """`[N, K]` to `[N, G, width]`, padded with zeros; G as the grid counts them but for groups of padding alone."""
    return pad(w, (0, -w.shape[1] % width)).view(len(w), -1, width)
