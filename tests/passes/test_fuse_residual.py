"""fuse-residual: the linear before a residual add does the addition; Gemma's post-norms stand in the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from llmc.passes.graph import calls
from llmc.passes.pipelines import FuseResidual
from torch.fx import GraphModule

llmc_ops = torch.ops.llmc


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "phi3"])
def test_fires_on_every_branch(before: Callable[..., Any], name: str) -> None:
    stage = before("fuse-residual", name, target="h100-bf16")
    layers = stage.store.checkpoint.config.num_hidden_layers
    counts = stage.counts()
    assert counts["llmc.add_rms_norm"] == 2 * layers
    result = stage.check_preserves_logits()
    assert result.matches == {"linear_residual": 2 * layers}
    after = stage.counts()
    assert "llmc.add_rms_norm" not in after
    assert after["llmc.rms_norm"] == counts.get("llmc.rms_norm", 0) + 2 * layers
    assert after["llmc.linear"] == counts["llmc.linear"] - 2 * layers


def test_a_post_norm_keeps_its_branch(before: Callable[..., Any]) -> None:
    stage = before("fuse-residual", "gemma3", target="h100-bf16")
    text = str(stage.module.graph)
    assert not stage.run().changed
    assert str(stage.module.graph) == text


def test_a_branch_with_another_reader_is_left(before: Callable[..., Any]) -> None:
    stage = before("fuse-residual", "llama", target="h100-bf16")
    module: GraphModule = stage.module
    norms = list(calls(module, llmc_ops.add_rms_norm.default))
    output = module.graph.output_node()
    output.args = ((output.args[0], norms[0].args[0]),)
    assert FuseResidual().run(module).matches == {"linear_residual": len(norms) - 1}
