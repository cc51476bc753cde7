"""fuse-rope: queries and keys of every layer, whole heads and Phi-3's partial ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def test_fuses_queries_and_keys(before: Callable[..., Any], architecture: str) -> None:
    stage = before("fuse-rope", architecture)
    layers = stage.store.checkpoint.config.num_hidden_layers
    result = stage.check_preserves_logits()
    assert result.matches["rope"] == 2 * layers
    assert not {"aten.cos", "aten.sin", "aten.neg", "aten.cat"} & set(stage.counts())


def test_fuses_phi3_with_whole_heads_rotated(before: Callable[..., Any]) -> None:
    stage = before("fuse-rope", "phi3", partial_rotary_factor=1.0)
    assert stage.check_preserves_logits().matches["rope"] == 4
    assert "aten.cat" not in stage.counts()


def test_gemma_keeps_its_two_bases_apart(before: Callable[..., Any]) -> None:
    stage = before("fuse-rope", "gemma3")
    stage.run()
    tables = [str(n.args[2].target) for n in stage.module.graph.nodes if n.target is torch.ops.llmc.rope.default]
    assert [t.split("_attention_inv_freq")[0].split(".")[-1] for t in tables] == ["sliding"] * 4 + ["full"] * 2


def test_leaves_a_rotation_by_different_tables_alone(before: Callable[..., Any]) -> None:
    stage = before("fuse-rope", "llama")
    sin = next(n for n in stage.module.graph.nodes if n.target is torch.ops.aten.sin.default)
    with stage.module.graph.inserting_before(sin):
        other = stage.module.graph.call_function(torch.ops.aten.mul.Tensor, (sin.args[0], 2.0))
    other.meta["val"] = sin.args[0].meta["val"]
    sin.args = (other,)
    assert stage.run().matches["rope"] == 0
