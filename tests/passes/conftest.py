"""Runs the pipeline up to a pass on a tiny model, so that each pass is tested on the graph it really sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from llmc.codegen import ProgramOptions, make_backend
from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.eager import evaluate
from llmc.compiler.trace import trace
from llmc.compiler.weights import WeightStore
from llmc.passes.base import Pass, PassResult
from llmc.passes.graph import operator_counts, phases
from llmc.passes.quantize import Quantize, QuantizeOptions
from llmc.targets import resolve_target
from torch import fx


@dataclass
class Stage:
    """A graph just before pass `step`, with the weights to run it on."""

    module: fx.GraphModule
    step: Pass
    store: WeightStore

    def logits(self, phase: str | None = None) -> torch.Tensor:
        """Logits of 45 fixed tokens: past the tiny models' sliding window and two block boundaries."""
        vocab = self.store.checkpoint.config.vocab_size
        tokens = torch.randint(vocab, (45,), generator=torch.Generator().manual_seed(1))
        module = phases(self.module)[phase] if phase else self.module
        return evaluate(module, self.store, tokens)

    def counts(self) -> dict[str, int]:
        """Operator counts now."""
        return operator_counts(self.module)

    def run(self) -> PassResult:
        """Run the pass."""
        return self.step.run(self.module)

    def check_preserves_logits(self, tolerance: float = 2e-5) -> PassResult:
        """Run the pass, compare the logits before and after, and check that a second run changes nothing."""
        before = self.logits()
        result = self.run()
        assert result.changed
        for phase in phases(self.module):
            torch.testing.assert_close(self.logits(phase), before, rtol=tolerance, atol=tolerance * float(before.abs().max()))
        text = str(self.module.graph)
        assert not self.run().changed
        assert str(self.module.graph) == text
        return result


@pytest.fixture
def before(tiny_checkpoint: Callable[..., Path]) -> Callable[..., Stage]:
    """`before("fuse-rope", "llama")` -> the stage just before that pass of the target's pipeline; keyword arguments change the config."""

    def make(
        name: str,
        architecture: str,
        quantization: QuantizeOptions = QuantizeOptions(),  # noqa: B008 - frozen
        target: str = "cpu-f32",
        **overrides: Any,
    ) -> Stage:
        checkpoint = open_checkpoint(str(tiny_checkpoint(architecture, **overrides)))
        module = trace(checkpoint.config)
        backend = make_backend(resolve_target(target), ProgramOptions(max_tokens=64, cache=Path("unused")))
        for step in backend.pipeline():
            if isinstance(step, Quantize) and target.startswith("cpu"):
                step = Quantize(quantization)
            if step.name == name:
                return Stage(module, step, WeightStore(checkpoint, backend.decode_matrix))
            step.run(module)
        raise AssertionError(f"no pass {name}")

    return make
