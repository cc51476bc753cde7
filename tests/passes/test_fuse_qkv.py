"""fuse-qkv: three projections become one, biases included; Phi-3's single projection is left as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def test_stacks_three_projections(before: Callable[..., Any], architecture: str) -> None:
    stage = before("fuse-qkv", architecture)
    layers = stage.store.checkpoint.config.num_hidden_layers
    linears = stage.counts()["llmc.linear"]
    if architecture == "phi3":
        result = stage.run()
        assert (result.changed, result.matches) == (False, {"qkv": 0, "already_fused": layers})
        return
    assert stage.check_preserves_logits().matches == {"qkv": layers, "already_fused": 0}
    assert stage.counts()["llmc.linear"] == linears - 2 * layers
    weights = stage.module.meta["weights"]
    fused = weights["model.layers.0.self_attn.qkv_proj.weight"]
    assert [s.split(".")[-2] for s in fused.sources] == ["q_proj", "k_proj", "v_proj"]
    assert not any("q_proj" in name for name in weights)
    assert ("model.layers.0.self_attn.qkv_proj.bias" in weights) == (architecture == "qwen2")


def test_leaves_projections_of_different_inputs_alone(before: Callable[..., Any]) -> None:
    stage = before("fuse-qkv", "llama")
    key = next(n for n in stage.module.graph.nodes if "k_proj" in n.name and "linear" in str(n.target))
    key.args = (key.args[0].args[0], *key.args[1:])  # the residual stream instead of its norm
    assert stage.run().matches["qkv"] == 1
