"""Calibration graphs of tiny models with what a quantiser needs beside them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.trace import trace
from llmc.compiler.weights import WeightStore
from llmc.passes.graph import WeightTable
from llmc.passes.pipelines import calibration_graph
from llmc.quantization.layerwise import Step, make_steps
from torch import Tensor, fx


@dataclass
class Setup:
    """A calibration graph, its steps and weights, and random samples."""

    module: fx.GraphModule
    steps: list[Step]
    store: WeightStore
    samples: list[Tensor]

    def read(self, name: str) -> Tensor:
        """A weight in float32."""
        table = WeightTable.of(self.module)
        return table.constants[name] if name in table.constants else self.store.read(table[name])

    def matrices(self) -> list[str]:
        """Names of all matrices that linears read."""
        return [name for step in self.steps for name in step.weights()]


@pytest.fixture
def setup(tiny_checkpoint: Callable[..., Path]) -> Callable[..., Setup]:
    """`setup("llama", samples=9, length=24)`."""

    def make(architecture: str, samples: int = 9, length: int = 24, **overrides: Any) -> Setup:
        checkpoint = open_checkpoint(str(tiny_checkpoint(architecture, **overrides)))
        module = calibration_graph(trace(checkpoint.config))
        generator = torch.Generator().manual_seed(1)
        tokens = [torch.randint(3, checkpoint.config.vocab_size, (length + i,), generator=generator) for i in range(samples)]
        return Setup(module, make_steps(module), WeightStore(checkpoint), tokens)

    return make
