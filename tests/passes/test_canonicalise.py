"""canonicalise: export's leftovers go, one-to-one operators are lowered, unknown operators are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from llmc.errors import UnsupportedModelError
from llmc.passes.canonicalise import Canonicalise


def test_keeps_the_numbers_and_leaves_no_leftovers(before: Callable[..., Any], architecture: str) -> None:
    stage = before("canonicalise", architecture)
    layers = stage.store.checkpoint.config.num_hidden_layers
    result = stage.check_preserves_logits()
    counts = stage.counts()
    assert counts["llmc.embedding"] == 1
    assert counts["llmc.linear"] == (4 if architecture == "phi3" else 7) * layers + 1
    leftovers = {
        "aten.linear",
        "aten.embedding",
        "aten.type_as",
        "aten.cumsum",
        "aten.diff",
        "aten.sym_size.int",
        "aten.dropout",
    }
    assert not leftovers & set(counts)
    assert result.matches["dead"] > 0
    casts = {n.meta["val"].dtype for n in stage.module.graph.nodes if "aten.to" in str(n.target)}
    assert casts <= {torch.float32}  # what is left turns positions into floats


def test_gemma_scales_its_embedding(before: Callable[..., Any]) -> None:
    stage = before("canonicalise", "gemma3")
    stage.run()
    embedding = next(n for n in stage.module.graph.nodes if n.target is torch.ops.llmc.embedding.default)
    assert embedding.args[2] == pytest.approx(72**0.5)


def test_tied_head_is_one_weight(before: Callable[..., Any]) -> None:
    names = before("canonicalise", "gemma3").module.meta["weights"]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


def test_refuses_an_unknown_operator(before: Callable[..., Any]) -> None:
    stage = before("canonicalise", "llama")
    silu = next(n for n in stage.module.graph.nodes if n.target is torch.ops.aten.silu.default)
    silu.target = torch.ops.aten.selu.default
    with pytest.raises(UnsupportedModelError) as error:
        Canonicalise().run(stage.module)
    message = str(error.value)
    assert "aten.selu" in message
    assert "model.layers.0.mlp" in message
    assert ".py:" in message
    assert "supported: aten" in message
