"""SmoothQuant: moves outliers of activations into the weights where both are rounded to 8 bits (Xiao et al. 2023)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, cast

import numpy as np
import torch
from torch import Tensor

from ..errors import UsageError
from ..formats.floats import from_fp8, quantize_fp8
from ..formats.grid import Grid
from ..formats.round_to_nearest import round_to_nearest
from ..passes.dialect import llmc
from .pairs import AbsorbPair

FORMATS: Final = ("w8a8", "fp8", "fp8-fnuz")
"""Formats whose activations are rounded to 8 bits with a scale for each token, found while the model runs."""
DEFAULT_STRENGTH: Final = 0.8
"""For models the paper has no figure for. All supported ones are, like Mistral, RMS norms and gated MLPs, whose outliers want more than the
0.5 that the paper gives OPT; of the two figures for that family, 0.85 and 0.8, this is the one that leaves weights easier to round."""
STRENGTHS: Final = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9)  # what `search_strength` tries
_PUBLISHED: Final = {"llama": 0.85, "mistral": 0.8}
_SMALLEST: Final = 1e-5  # the paper's floor for a column's largest weight


@dataclass(frozen=True, slots=True, kw_only=True)
class StrengthSearch:
    """The scale found, float32 `[K]`; `strength` is its alpha, None for the identity; mean square errors without and with it."""

    scale: Tensor
    strength: float | None
    loss_before: float
    loss_after: float

    @property
    def spread(self) -> float:
        """s_max / s_min."""
        return float(self.scale.max() / self.scale.min())


def applies_to(pair: AbsorbPair, format: str) -> bool:
    """Whether smoothing is for this pair: between a norm and its linears, in a format with 8-bit activations.

    Other producers are linears, whose own rows would take the outliers, and what they make has been found to gain little.
    """
    return pair.kind == "norm-linear" and format in FORMATS


def strength_for(model_type: str) -> float:
    """Alpha for a config's `model_type`: the published one, else `DEFAULT_STRENGTH`."""
    return _PUBLISHED.get(model_type, DEFAULT_STRENGTH)


def smooth_scales(x_amax: Tensor, weights: Sequence[Tensor], strength: float) -> Tensor:
    """`s = max|X|^a / max|W|^(1-a)` for each input channel: float32 `[K]`, centred so that s_max * s_min = 1.

    `x_amax [K]` is the largest magnitude of each channel of the input, `weights` the `[N, K]` of every linear that reads it; the input is
    divided by s, the weights are multiplied. A factor common to all channels is lost in scales that follow rows and tokens, so centring
    changes nothing but keeps norm weights in range. Channels that were always zero keep 1; those that no weight reads take the largest s,
    so that they do not widen a token's range. Raises `UsageError` for a strength outside 0..1.
    """
    if not 0.0 <= strength <= 1.0:
        raise UsageError(
            f"smoothquant: the strength is {strength}, expected 0 (all left to the activations) to 1 (all to the weights)"
        )
    w_amax = torch.stack([weight.abs().amax(0) for weight in weights]).amax(0).float()
    scale = torch.ones_like(w_amax)
    alive = (x_amax > 0) & torch.isfinite(x_amax)
    read = alive & (w_amax > 0)
    if bool(read.any()):
        raw = x_amax[read].double().pow(strength) / w_amax[read].double().clamp_min(_SMALLEST).pow(1 - strength)
        scale[read] = (raw / (raw.max() * raw.min()).sqrt()).float()
        scale[alive & ~read] = scale[read].max()
    return scale


def search_strength(
    x: Tensor,
    x_amax: Tensor,
    weights: Sequence[Tensor],
    format: str,
    *,
    strengths: Sequence[float] = STRENGTHS,
    loss: Callable[[Tensor], float] | None = None,
) -> StrengthSearch:
    """The alpha of `strengths`, or no smoothing, whose rounded product is nearest to the float one.

    `x [T, K]`, float32, are inputs to measure on, `x_amax [K]` the largest magnitudes over all of calibration, `weights` the `[N, K]`,
    float32, of every linear that reads them. `loss(scale)` is the error that counts; by default the mean square error of all outputs, with
    weights rounded in `format` and inputs as the format's linears round them, token by token. Raises `UsageError` for another format.
    """
    measure = loss or _output_loss(x, weights, format)
    best = torch.ones_like(x_amax)
    strength, before = None, measure(best)
    after = before
    for candidate in strengths:
        scale = smooth_scales(x_amax, weights, candidate)
        error = measure(scale)
        if error < after:
            best, strength, after = scale, candidate, error
    return StrengthSearch(scale=best, strength=strength, loss_before=before, loss_after=after)


def _output_loss(x: Tensor, weights: Sequence[Tensor], format: str) -> Callable[[Tensor], float]:
    if format not in FORMATS:
        raise UsageError(
            f"smoothquant: format {format!r} does not round activations to 8 bits; choose one of {', '.join(FORMATS)}"
        )
    exact = [x @ weight.T for weight in weights]
    outputs = sum(len(weight) for weight in weights)

    def loss(scale: Tensor) -> float:
        error = 0.0
        for weight, expected in zip(weights, exact, strict=True):
            rounded = cast(Tensor, llmc.linear(x / scale, _decoded(weight * scale, format), None, format))
            error += float((rounded - expected).square_().sum(dtype=torch.float64))
        return error / (len(x) * outputs)

    return loss


def _decoded(weight: Tensor, format: str) -> Tensor:
    """The weight as `format` gives it back."""
    grid = Grid.parse(format)
    if grid is not None:
        return torch.from_numpy(round_to_nearest(weight, grid).dequantize())
    fnuz = format == "fp8-fnuz"
    bits, scale = quantize_fp8(weight.numpy(), fnuz=fnuz)
    return torch.from_numpy(from_fp8(bits, fnuz=fnuz) * scale[:, np.newaxis])
