"""sensitivity: the divergence of one matrix alone is what running the model with just that one rounded gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from llmc.codegen.cpu.formats import decode_matrix
from llmc.compiler.eager import evaluate
from llmc.compiler.weights import WeightStore
from llmc.formats.round_to_nearest import round_to_nearest
from llmc.passes.graph import Weight
from llmc.quantization.kv_sensitivity import measure_kv
from llmc.quantization.probe import Probe
from llmc.quantization.sensitivity import TRIED, format_bytes, measure_sensitivities
from torch import Tensor

FORMATS = ("int3-g32", "int5-g32", "int8-g32", "bf16")


class _OneRounded(WeightStore):
    """Reads one matrix rounded."""

    rounded = ""

    def decoded(self, name: str, weight: Weight) -> Tensor:
        value = self.read(weight)
        return torch.from_numpy(round_to_nearest(value, TRIED).dequantize()) if name == self.rounded else value


@pytest.mark.parametrize("architecture_", ["llama", "gemma3"])
def test_each_matrix_is_measured_alone(setup: Callable[..., Any], architecture_: str) -> None:
    s = setup(architecture_, samples=2)
    probe = Probe.make(s.module, s.steps, s.samples, s.read)
    found = measure_sensitivities(
        s.module, s.steps, probe, FORMATS, s.read, lambda v, format: torch.from_numpy(decode_matrix(v.numpy(), format))
    )
    assert list(found) == s.matrices()
    for name in (s.matrices()[1], s.matrices()[-1]):
        store = _OneRounded(s.store.checkpoint)
        store.rounded = name
        logits = [evaluate(s.module, store, tokens)[rows] for tokens, rows in zip(s.samples, probe.rows, strict=True)]
        assert found[name].kl == pytest.approx(probe.compare(logits).kl_mean, rel=1e-4)
    for sensitivity in found.values():
        errors = [sensitivity.errors[format] for format in ("int3-g32", "int4-g32", "int5-g32", "int8-g32", "bf16")]
        assert errors == sorted(errors, reverse=True)
        by_format = {choice.format: choice for choice in sensitivity.choices()}
        assert by_format["int4-g32"].kl == pytest.approx(sensitivity.kl)
        assert by_format["int3-g32"].kl == pytest.approx(sensitivity.kl * errors[0] / errors[1])


def test_bytes_of_formats() -> None:
    assert format_bytes("int4-g32", 8, 128) == 8 * 64 + 8 * 4 * 2
    assert format_bytes("bf16", 8, 128) == 2048
    assert format_bytes("fp8", 8, 128) == 8 * 128 + 32


def test_fewer_bits_of_a_cache_cost_more(setup: Callable[..., Any]) -> None:
    s = setup("llama", samples=2, length=150)
    probe = Probe.make(s.module, s.steps, s.samples, s.read)
    layers = measure_kv(s.module, s.steps, probe, ("int4", "int8", "bf16"), s.read)
    assert [layer.layer for layer in layers] == [0, 1]
    for layer in layers:
        assert layer.kl["int4"] > layer.kl["int8"] > layer.kl["bf16"] == 0
        sizes = {choice.format: choice.num_bytes for choice in layer.choices(100)}
        assert sizes["bf16"] == 100 * 2 * 2 * 16 * 2  # tokens, keys and values, heads, head size, bytes
        assert sizes["int4"] < sizes["int8"] < sizes["bf16"]
    again = Probe.make(s.module, s.steps, s.samples, s.read)  # the graph is left as it was
    assert probe.compare(again.reference).kl_max == 0
