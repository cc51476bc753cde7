"""fuse-gate-up: gate and up projections become one linear with a gated epilogue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def test_one_linear_for_each_mlp(before: Callable[..., Any], architecture: str) -> None:
    stage = before("fuse-gate-up", architecture)
    layers = stage.store.checkpoint.config.num_hidden_layers
    linears = stage.counts()["llmc.linear"]
    assert stage.check_preserves_logits().matches["linear_glu"] == layers
    assert stage.counts()["llmc.linear"] == linears - (1 if architecture == "phi3" else 2) * layers
    assert not {"llmc.glu", "aten.chunk"} & set(stage.counts())


def test_leaves_swapped_chunks_alone(before: Callable[..., Any]) -> None:
    stage = before("fuse-gate-up", "phi3")
    glu = next(n for n in stage.module.graph.nodes if "glu" in str(n.target))
    glu.args = (glu.args[1], glu.args[0], *glu.args[2:])
    assert stage.run().matches["linear_glu"] == 1
