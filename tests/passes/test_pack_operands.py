"""pack-operands: each linear input is packed once, inside the norm that makes it where there is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from llmc.passes.quantize import QuantizeOptions


@pytest.mark.parametrize("format", ["f32", "bf16", "int8"])
def test_packs_every_input_once(before: Callable[..., Any], architecture: str, format: str) -> None:
    stage = before("pack-operands", architecture, QuantizeOptions(weights=format, head=format))
    layers = stage.store.checkpoint.config.num_hidden_layers
    result = stage.check_preserves_logits(1e-4)
    assert result.matches == {"in_norm": 2 * (2 * layers + 1), "pack_rows": 2 * 2 * layers}  # in either phase


def test_a_norm_with_another_reader_keeps_its_floats(before: Callable[..., Any]) -> None:
    stage = before("pack-operands", "llama", QuantizeOptions(weights="int8", head="int8"))
    norm = next(n for n in stage.module.graph.nodes if n.target is torch.ops.llmc.rms_norm.default)
    add = next(n for n in stage.module.graph.nodes if n.target is torch.ops.llmc.add_rms_norm.default)
    add.args = (add.args[0], norm, *add.args[2:])
    assert stage.run().matches == {"in_norm": 4 + 5, "pack_rows": 5 + 4}  # the other phase has no such reader
    assert norm.args[-1] == ""
