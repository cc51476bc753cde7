"""fuse-rope-append: everything between the projection and attention becomes one operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from llmc.errors import PassError


def test_fuses_every_layer(before: Callable[..., Any], architecture: str) -> None:
    stage = before("fuse-rope-append", architecture)
    layers = stage.store.checkpoint.config.num_hidden_layers
    result = stage.check_preserves_logits()
    normed = layers if architecture in ("gemma3", "qwen3") else 0
    assert result.matches == {"rope_append": layers, "with_qk_norm": normed}
    kinds = {name.split(".")[0] for name in stage.counts()} - {"getitem"}
    assert kinds == {"llmc"}  # nothing of aten is left


def test_a_key_without_rotary_is_an_error(before: Callable[..., Any]) -> None:
    stage = before("fuse-rope-append", "llama")
    rope = [n for n in stage.module.graph.nodes if n.target is torch.ops.llmc.rope.default][1]
    rope.replace_all_uses_with(rope.args[0])
    with pytest.raises(PassError, match=r"model\.layers\.0\.self_attn.*expected llmc\.rope on both"):
        stage.run()
