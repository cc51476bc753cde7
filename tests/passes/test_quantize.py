"""quantize: formats reach every matrix, the error is that of the format, and bad options are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from llmc.errors import UsageError
from llmc.passes.quantize import QuantizeOptions

_BOUNDS = {"bf16": 0.02, "f16": 0.004, "int8": 0.05, "int8-g128": 0.05, "int5-g32-asym": 0.3, "int4-g32": 0.6}


@pytest.mark.parametrize("format", list(_BOUNDS))
def test_error_is_that_of_the_format(before: Callable[..., Any], format: str) -> None:
    head = "int8" if format == "int8-g128" else format
    stage = before("quantize", "llama", QuantizeOptions(weights=format, head=head))
    exact = stage.logits()
    result = stage.run()
    layers = stage.store.checkpoint.config.num_hidden_layers
    assert sum(result.matches.values()) == 4 * layers + 2
    assert result.matches[head] >= 2
    error = ((stage.logits() - exact).norm() / exact.norm()).item()
    assert 1e-5 < error < _BOUNDS[format]
    assert not stage.run().changed


def test_tied_head_has_one_format(before: Callable[..., Any]) -> None:
    stage = before("quantize", "gemma3", QuantizeOptions(weights="int4-g64", head="int8"))
    stage.run()
    assert stage.module.meta["weights"]["model.embed_tokens.weight"].format == "int8"
    used = [n for n in stage.module.graph.nodes if any(getattr(a, "target", "") == "model.embed_tokens.weight" for a in n.args)]
    assert [n.args[-1] for n in used] == ["int8", "int8"]


@pytest.mark.parametrize("options", [{"weights": "int5"}, {"head": "w4a16-g32"}, {"weights": "int4-g48"}, {"head": "int8-g16"}])
def test_refuses_unknown_formats(options: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="choose"):
        QuantizeOptions(**options)


def test_vectors_stay_float(before: Callable[..., Any]) -> None:
    stage = before("quantize", "qwen2", QuantizeOptions(weights="int8", head="int8"))
    stage.run()
    formats = {len(w.shape): set() for w in stage.module.meta["weights"].values()}
    for weight in stage.module.meta["weights"].values():
        formats[len(weight.shape)].add(weight.format)
    assert formats == {1: {"f32"}, 2: {"int8"}}
    assert torch.ops.llmc.linear.default
