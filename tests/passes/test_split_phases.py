"""split-phases: both phases run any batch, differ in how attention is divided, and compute the wanted rows alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from llmc.passes.graph import phases


def test_both_phases_equal_the_graph_before(before: Callable[..., Any], architecture: str) -> None:
    stage = before("split-phases", architecture)
    layers = stage.store.checkpoint.config.num_hidden_layers
    result = stage.check_preserves_logits()
    assert result.matches == {"gather_rows": 1, "split_kv": layers}
    assert list(phases(stage.module)) == ["prefill", "decode"]
    for name, split in (("prefill", False), ("decode", True)):
        graph = phases(stage.module)[name].graph
        attentions = [n for n in graph.nodes if n.target is torch.ops.llmc.rope_paged_attention.default]
        assert {n.args[-1] for n in attentions} == {split}


def test_the_head_sees_the_gathered_rows(before: Callable[..., Any]) -> None:
    stage = before("split-phases", "gemma3")
    stage.run()
    output = stage.module.graph.output_node().args[0]
    head = output[0] if isinstance(output, (tuple, list)) else output
    rows = next(n for n in stage.module.graph.nodes if n.target == "logit_rows").meta["val"].shape[0]
    assert head.meta["val"].shape == (1, rows, 301)
