"""Chooses the scales of one layer's absorb pairs: AWQ for low-bit weights, SmoothQuant for 8-bit activations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from ..formats.grid import Grid
from ..passes.graph import WeightTable
from . import smoothquant
from .awq import Consumer, search_scales
from .calibration.layer_detectors import scale_range
from .method import Equalisation
from .pairs import AbsorbPair
from .rescale import Rescaling
from .second_moment import SecondMoment


def equalise(
    equalisation: Equalisation,
    pairs: Sequence[AbsorbPair],
    moments: Mapping[str, SecondMoment],
    inputs: Mapping[str, Tensor],
    formats: Mapping[str, str],
    read: Callable[[str], Tensor],
    table: WeightTable,
    source_shape: Callable[[str], tuple[int, ...]],
    *,
    strength: float,
) -> tuple[Rescaling, list[str]]:
    """The rescaling of `pairs` and warnings.

    `moments` are of the input of each pair's first consumer, by its weight's name, and `inputs` one sample of it, `[T, K]`; `read` gives
    weights in float32; `strength` is what SmoothQuant's authors publish for the model, tried among others.
    """
    rescaling, warnings = Rescaling(), []
    for pair in pairs:
        moment = moments[pair.consumers[0]]
        weights = {name: read(name) for name in pair.consumers}
        grids = {name: Grid.parse(formats[name]) for name in pair.consumers}
        if equalisation == "smoothquant":
            if not all(smoothquant.applies_to(pair, formats[name]) for name in pair.consumers):
                continue
            name = pair.consumers[0]
            strengths = sorted({*smoothquant.STRENGTHS, strength})
            smooth = smoothquant.search_strength(
                inputs[name], moment.amax, list(weights.values()), formats[name], strengths=strengths
            )
            scale = smooth.scale
        else:
            consumers = [
                Consumer(weight=w, grid=g) for w, g in zip(weights.values(), grids.values(), strict=True) if g is not None
            ]
            if len(consumers) < len(weights):
                continue
            found = search_scales(moment.mean_abs, moment.hessian() / 2, consumers, tie=pair.tie)
            scale = found.scale
            doubt = scale_range(str(pair), scale.numpy())
            if doubt is not None:
                warnings.append(str(doubt))
        rescaling = rescaling.then(Rescaling.of(pair, scale, table, source_shape))
    return rescaling, warnings
