"""fuse-rms-norm: every norm of every architecture, and not what only looks like one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_NORMS_PER_LAYER = {"llama": 2, "qwen2": 2, "mistral": 2, "phi3": 2, "qwen3": 4, "gemma3": 6}


def test_fuses_every_norm(before: Callable[..., Any], architecture: str) -> None:
    stage = before("fuse-rms-norm", architecture)
    layers = stage.store.checkpoint.config.num_hidden_layers
    result = stage.check_preserves_logits()
    assert result.matches["rms_norm"] == _NORMS_PER_LAYER[architecture] * layers + 1
    assert stage.counts()["llmc.rms_norm"] == result.matches["rms_norm"]
    assert "aten.rsqrt" not in stage.counts()


def test_offset_is_gemmas_alone(before: Callable[..., Any]) -> None:
    for architecture, offset in (("gemma3", 1.0), ("llama", 0.0)):
        stage = before("fuse-rms-norm", architecture)
        stage.run()
        norms = [n for n in stage.module.graph.nodes if n.target is torch.ops.llmc.rms_norm.default]
        assert {n.args[3] for n in norms} == {offset}


def test_leaves_a_cube_alone(before: Callable[..., Any]) -> None:
    stage = before("fuse-rms-norm", "llama")
    power = next(n for n in stage.module.graph.nodes if n.target is torch.ops.aten.pow.Tensor_Scalar)
    power.args = (power.args[0], 3)
    assert stage.run().matches["rms_norm"] == 4
    assert stage.counts()["aten.rsqrt"] == 1
