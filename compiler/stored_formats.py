"""Keeps the formats of a checkpoint that is quantised already."""

from __future__ import annotations

from torch import fx

from ..codegen import Backend
from ..passes.graph import WeightTable
from ..passes.pipelines import calibration_graph
from .weights import WeightStore

STORED = "stored"
"""The quantization that keeps what a checkpoint stores."""


def stored_formats(backend: Backend, traced: fx.GraphModule, store: WeightStore) -> dict[str, str]:
    """The format of every matrix that the back end keeps as the checkpoint stores it, by graph name.

    A fused projection is kept where all its parts are stored alike.
    """
    formats: dict[str, str] = {}
    for name, weight in WeightTable.of(calibration_graph(traced)).items():
        stored = store.kept_format(weight) if len(weight.shape) == 2 else None
        format = None if stored is None else backend.format_for(stored)
        if format is not None:
            formats[name] = format
    return formats
