"""What a quantiser hands on: matrices on disk, the scales that moved between layers, and what was lost where."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..formats.grid import QuantizedMatrix
from .rescale import Rescaling
from .work_folder import Part


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixRecord:
    """What became of one matrix; losses are relative squared errors of its outputs (None where it was not rounded to a grid).

    They are measured on every eighth sample, which the method does not see, beside what plain rounding to nearest loses there.
    `input_step` is that of all its inputs where they are rounded in steps of one size (`find_step`).
    """

    name: str
    format: str
    layer: int
    loss: float | None = None
    rtn_loss: float | None = None
    tokens: int = 0
    input_step: float | None = None


@dataclass(slots=True)
class QuantizedModel:
    """The outcome: matrices on disk by name, the rescaling of what is read from the checkpoint, a record of each matrix, warnings."""

    parts: dict[str, Part] = field(default_factory=dict)
    rescaling: Rescaling = field(default_factory=Rescaling)
    records: list[MatrixRecord] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def matrix(self, name: str) -> QuantizedMatrix | None:
        """The quantised matrix of graph weight `name`; None where it stays as it is in the checkpoint."""
        return self.parts[name].matrix(name) if name in self.parts else None
