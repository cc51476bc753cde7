"""fuse-glu: the gated activation of every MLP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def test_fuses_every_mlp(before: Callable[..., Any], architecture: str) -> None:
    stage = before("fuse-glu", architecture)
    layers = stage.store.checkpoint.config.num_hidden_layers
    assert stage.check_preserves_logits().matches["glu"] == layers
    activations = {n.args[2] for n in stage.module.graph.nodes if n.target is torch.ops.llmc.glu.default}
    assert activations == ({"gelu_tanh"} if architecture == "gemma3" else {"silu"})


def test_leaves_an_activation_with_two_readers_alone(before: Callable[..., Any]) -> None:
    stage = before("fuse-glu", "llama")
    silu = next(n for n in stage.module.graph.nodes if n.target is torch.ops.aten.silu.default)
    other = list(stage.module.graph.nodes)[-2]
    other.args = (silu, *other.args[1:])
    other.meta["val"] = None  # the head reads the activation: not a model, but a graph with a second reader
    assert stage.run().matches["glu"] == 1
