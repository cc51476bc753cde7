"""fuse-add-norm: every residual add but none whose old residual is needed later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def test_fuses_every_residual_add(before: Callable[..., Any], architecture: str) -> None:
    stage = before("fuse-add-norm", architecture)
    layers = stage.store.checkpoint.config.num_hidden_layers
    result = stage.check_preserves_logits()
    post = 2 * layers if architecture == "gemma3" else 0
    assert result.matches == {"add_rms_norm": 2 * layers, "with_post_norm": post}
    assert stage.counts()["llmc.rms_norm"] == 1 + (2 * layers if architecture in ("gemma3", "qwen3") else 0)
    assert "aten.add.Tensor" not in stage.counts()


def test_keeps_a_residual_that_is_read_later(before: Callable[..., Any]) -> None:
    stage = before("fuse-add-norm", "llama")
    adds = [n for n in stage.module.graph.nodes if n.target is torch.ops.aten.add.Tensor]
    adds[-1].args = (adds[0].args[0], adds[-1].args[1])  # the last add skips back to the first residual
    assert stage.run().matches["add_rms_norm"] == 3
