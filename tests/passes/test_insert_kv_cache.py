"""insert-kv-cache: whole-sequence attention and paged attention give the same logits; the inputs are the step contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from llmc.errors import PassError
from llmc.passes.insert_kv_cache import InsertKvCache


def test_paged_attention_equals_whole_attention(before: Callable[..., Any], architecture: str) -> None:
    stage = before("insert-kv-cache", architecture)
    config = stage.store.checkpoint.config
    assert stage.check_preserves_logits().matches["paged_attention"] == config.num_hidden_layers
    inputs = [n.target for n in stage.module.graph.nodes if n.op == "placeholder"]
    assert inputs == ["token_ids", "positions", "query_start", "context_len", "block_table", "kv_pool"]
    cache = stage.module.meta["kv_cache"]
    assert (cache.num_layers, cache.num_kv_heads) == (config.num_hidden_layers, config.num_key_value_heads)


def test_sliding_window_reaches_the_operator(before: Callable[..., Any]) -> None:
    stage = before("insert-kv-cache", "gemma3")
    stage.run()
    attentions = [n for n in stage.module.graph.nodes if n.target is torch.ops.llmc.paged_attention.default]
    assert [n.args[9] for n in attentions] == [37, 37, 0]


def test_a_graph_without_attention_is_an_error(before: Callable[..., Any]) -> None:
    stage = before("canonicalise", "llama")
    for node in stage.module.graph.nodes:
        if node.target is torch.ops.llmc.attention.default:
            node.target = torch.ops.aten.relu.default
    with pytest.raises(PassError, match=r"no llmc\.attention"):
        InsertKvCache().run(stage.module)
