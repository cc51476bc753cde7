"""Measures what quantising each matrix alone does to the model's output, and predicts it for formats that were not tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, fx

from ..formats.grid import Grid
from ..formats.round_to_nearest import round_to_nearest
from .allocate import Choice
from .layerwise import Forward, ReadWeight, Step
from .probe import Probe
from .second_moment import SecondMoment

TRIED: Final = Grid(bits=4, group=32)
"""The grid every matrix is tried on: coarse enough for its effect to stand out of the noise, fine enough for effects to add up."""
FLOAT_BITS: Final = {"f32": 32, "bf16": 16, "f16": 16}
_SAMPLED_ROWS: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """`kl` is the divergence with this matrix alone on the grid `TRIED`; `errors` are the relative output errors by format."""

    name: str
    layer: int
    shape: tuple[int, int]
    kl: float
    errors: Mapping[str, float]

    def choices(self, factor: float = 1.0) -> list[Choice]:
        """The formats as choices: divergence goes with the squared error, `factor` corrects for a method better than rounding."""
        n, k = self.shape
        per_error = self.kl / max(self.errors[str(TRIED)], 1e-30) * factor
        return [
            Choice(format=format, num_bytes=format_bytes(format, n, k), kl=per_error * error)
            for format, error in self.errors.items()
        ]


def format_bytes(format: str, n: int, k: int) -> int:
    """Bytes of a matrix `[n, k]` in a format, without a layout's padding."""
    grid = Grid.parse(format)
    if grid is not None:
        return grid.num_bytes(n, k)
    return n * k * FLOAT_BITS[format] // 8 if format in FLOAT_BITS else n * k + 4 * n  # fp8 has a scale a row


def measure_sensitivities(
    module: fx.GraphModule,
    steps: Sequence[Step],
    probe: Probe,
    candidates: Sequence[str],
    read: ReadWeight,
    decode: Callable[[Tensor, str], Tensor],
    on_matrix: Callable[[str], object] = lambda name: None,
) -> dict[str, Sensitivity]:
    """The sensitivity of every matrix that linears read, by name.

    `candidates` are formats; `decode(value, format)` gives a matrix as one without a grid gives it back. Each matrix costs the part of
    a forward pass that comes after it.
    """
    found: dict[str, Sensitivity] = {}
    forward = Forward(module, steps, probe.samples)
    embedded = {str(n.target) for node in steps[0].nodes for n in node.all_input_nodes if n.op == "get_attr"}
    for number, step in enumerate(steps[:-1]):
        forward.run(step, read)
        assert step.source is not None, "only the last step reads nothing"
        moment = SecondMoment(int(step.source.meta["val"].shape[-1]), name=step.weights()[0], diagonal_only=True)
        for value in forward.values(step.source):
            moment.update(value)
        for name in step.weights():
            w = read(name)
            tried = torch.from_numpy(round_to_nearest(w, TRIED).dequantize())

            def changed(other: str, name: str = name, tried: Tensor = tried) -> Tensor:
                return tried if other == name else read(other)

            if name in embedded:  # the head is the embedding too: its rounding acts from the start
                logits = probe.finish(Forward(module, steps, probe.samples), 0, changed)
            else:
                logits = probe.finish(forward.fork(), number + 1, changed)
            found[name] = Sensitivity(
                name=name,
                layer=step.layer,
                shape=(w.shape[0], w.shape[1]),
                kl=probe.mean_kl(logits),
                errors=_errors(w, moment.importance, {str(TRIED), *candidates}, decode),
            )
            on_matrix(name)
    return found


def _errors(w: Tensor, importance: Tensor, formats: set[str], decode: Callable[[Tensor, str], Tensor]) -> dict[str, float]:
    """Relative squared output errors as if input channels were independent, on evenly spaced rows."""
    sample = w[torch.linspace(0, len(w) - 1, min(len(w), _SAMPLED_ROWS)).round().long()]
    whole = float((sample.square() @ importance).sum().clamp_min(1e-30))
    errors = {}
    for format in sorted(formats):
        grid = Grid.parse(format)
        value = torch.from_numpy(round_to_nearest(sample, grid).dequantize()) if grid else decode(sample, format)
        errors[format] = float(((value - sample).square() @ importance).sum()) / whole
    return errors
