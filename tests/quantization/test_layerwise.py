"""layerwise: step by step over all samples, the values are those of the whole graph; spilled ones leave no file behind."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from llmc.compiler.eager import evaluate
from llmc.quantization.layerwise import Forward


def test_steps_give_the_logits_of_the_graph(setup: Callable[..., Any], architecture: str, tmp_path: Path) -> None:
    s = setup(architecture, samples=2)
    expected = [evaluate(s.module, s.store, tokens) for tokens in s.samples]
    for spill in (None, tmp_path):
        forward = Forward(s.module, s.steps, s.samples, spill)
        most = 0
        for step in s.steps:
            forward.run(step, s.read)
            most = max(most, len(list(tmp_path.iterdir())))
        for found, logits in zip(forward.values(s.steps[-1].nodes[-1]), expected, strict=True):
            torch.testing.assert_close(found, logits, rtol=0, atol=0)
        assert (most > 0) == (spill is not None)
    del forward
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_every_matrix_is_read_by_one_step_of_its_layer(setup: Callable[..., Any], architecture: str) -> None:
    s = setup(architecture)
    names = s.matrices()
    assert len(names) == len(set(names)) == 4 * s.store.checkpoint.config.num_hidden_layers + 1
    for step in s.steps[:-1]:
        for name in step.weights():
            head = s.store.checkpoint.config.num_hidden_layers + 1
            assert step.layer == (int(name.split(".")[2]) + 1 if ".layers." in name else head)


def test_a_fork_goes_its_own_way(setup: Callable[..., Any]) -> None:
    s = setup("gemma3", samples=2)
    forward = Forward(s.module, s.steps, s.samples)
    for step in s.steps[:3]:
        forward.run(step, s.read)
    other = forward.fork()
    for step in s.steps[3:]:
        other.run(step, lambda name: 2 * s.read(name))
    for step in s.steps[3:]:
        forward.run(step, s.read)
    end = s.steps[-1].nodes[-1]
    for kept, changed, tokens in zip(forward.values(end), other.values(end), s.samples, strict=True):
        torch.testing.assert_close(kept, evaluate(s.module, s.store, tokens), rtol=0, atol=0)
        assert not torch.allclose(kept, changed)
