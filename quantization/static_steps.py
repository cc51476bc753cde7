"""Finds the one step in which a linear's inputs are rounded to 8 bits where they do not get one for each token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

import torch
from torch import Tensor

from ..formats.static_step import LARGEST, with_step
from ..passes.dialect import round_rows

_SHRINK: Final = tuple(0.05 * i for i in range(20, 0, -1))  # shares of the largest input that the range may reach to
_SAMPLED_TOKENS: Final = 2048
_TINY: Final = 1e-30


def find_step(inputs: Callable[[], Iterable[Tensor]], weights: Iterable[Tensor], format: str) -> float:
    """The step for `inputs() [T, K]`, float32, of linears with `weights [N, K]` whose inputs `format` (`w8a8`, `fp8`) rounds.

    The largest input has to fit in the type, or the range is cut where that loses less: the loss of a token is the squared error of
    its outputs, relative to what they are, with errors of channels taken as independent. At most 2048 tokens, evenly spaced, decide.
    """
    norms = torch.stack([weight.square().sum(0) for weight in weights]).sum(0)  # [K]: what an error of a channel does
    amax = max(float(x.abs().amax()) for x in inputs())
    sample = torch.cat(list(_spaced(inputs, _SAMPLED_TOKENS)))
    size = (sample.square() @ norms).clamp_min(_TINY)
    losses = {}
    for share in _SHRINK:
        step = max(share * amax, _TINY) / LARGEST[format]
        error = round_rows(sample, with_step(format, step)) - sample
        losses[step] = float(((error.square() @ norms) / size).mean())
    return min(losses, key=losses.__getitem__)


def _spaced(inputs: Callable[[], Iterable[Tensor]], limit: int) -> Iterator[Tensor]:
    """Every so many tokens of all, about `limit` of them."""
    total = sum(len(x) for x in inputs())
    stride = -(-total // limit)
    first = 0
    for x in inputs():
        yield x[first::stride]
        first = (first - len(x)) % stride
