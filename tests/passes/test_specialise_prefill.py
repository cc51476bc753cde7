"""specialise-prefill: prefill's layers get matrices of their own, the rest stays shared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from llmc.errors import PassError
from llmc.passes.graph import WeightTable, phases
from llmc.passes.quantize import QuantizeOptions
from llmc.passes.specialise_prefill import SpecialisePrefill


def test_layers_are_stored_twice_and_the_head_once(before: Callable[..., Any], architecture: str) -> None:
    stage = before("specialise-prefill", architecture, QuantizeOptions(weights="int4-g32", head="int8-g32"))
    decode = stage.logits("decode")
    layers = stage.store.checkpoint.config.num_hidden_layers
    step = SpecialisePrefill(QuantizeOptions(weights="bf16", head="bf16"))
    assert step.run(stage.module).matches == {"bf16": 4 * layers}
    formats = [weight.format for name, weight in WeightTable.of(stage.module).items() if len(weight.shape) == 2]
    heads = 1 if stage.store.checkpoint.config.tie_word_embeddings else 2
    assert sorted(formats) == ["bf16"] * 4 * layers + ["int4-g32"] * 4 * layers + ["int8-g32"] * heads
    assert (stage.logits("decode") == decode).all()
    difference = (stage.logits("prefill") - decode).abs().max()
    assert difference > 0.01 * decode.abs().max()
    text = str(phases(stage.module)["prefill"].graph)
    assert not step.run(stage.module).changed
    assert str(phases(stage.module)["prefill"].graph) == text


def test_without_options_nothing_happens(before: Callable[..., Any]) -> None:
    stage = before("specialise-prefill", "llama")
    text = str(stage.module.graph)
    assert not stage.run().changed
    assert str(stage.module.graph) == text


def test_graphs_without_phases_are_refused(before: Callable[..., Any]) -> None:
    stage = before("split-phases", "llama")
    with pytest.raises(PassError, match="expected prefill and decode"):
        SpecialisePrefill(QuantizeOptions(weights="bf16", head="bf16")).run(stage.module)
