"""quantize-kv: each layer gets its format, the error is that of the format, and what cannot apply is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llmc.errors import UsageError
from llmc.passes import kv_formats
from llmc.passes.quantize_kv import KvOptions, QuantizeKv

_BOUNDS = {"bf16": 0.02, "fp8": 0.08, "int8": 0.02, "int4": 0.3}


def _attentions(stage: Any) -> list[Any]:
    return [n for n in stage.module.graph.nodes if n.target is torch.ops.llmc.rope_paged_attention.default]


def test_error_is_that_of_the_format(before: Callable[..., Any]) -> None:
    stage = before("quantize-kv", "llama")
    exact, layers, counts = stage.logits(), len(_attentions(stage)), stage.counts()
    assert not stage.run().changed  # f32, as the target's scheme says
    for format, bound in _BOUNDS.items():
        stage.step = QuantizeKv(KvOptions(formats=(format,)))
        result = stage.run()
        assert result.changed
        assert result.matches[format] == layers
        assert result.matches.get("rotated", 0) == (layers if format in ("int8", "int4") else 0)
        error = ((stage.logits() - exact).norm() / exact.norm()).item()
        assert 1e-5 < error < bound, format
        assert not stage.run().changed
    assert stage.counts() == counts


def test_layers_may_differ(before: Callable[..., Any]) -> None:
    stage = before("quantize-kv", "gemma3")
    stage.step = QuantizeKv(KvOptions(formats=("int8", "int8")))
    with pytest.raises(UsageError, match="given for 2 layers, but the model has 3"):
        stage.run()
    stage.step = QuantizeKv(KvOptions(formats=("int4", "f32", "fp8"), rotation=True))
    assert stage.run().matches == {"int4": 1, "f32": 1, "fp8": 1, "rotated": 2}
    assert [n.args[-3:] for n in _attentions(stage)] == [("int4", True, False), ("f32", False, False), ("fp8", True, False)]


def test_refuses_unknown_formats_and_a_rotation_of_nothing() -> None:
    with pytest.raises(UsageError, match="'int3' is unknown; choose from f32, bf16, fp8, int8, int4"):
        KvOptions(formats=("int8", "int3"))
    with pytest.raises(UsageError, match="rotation is asked for, but bf16 keys are not packed"):
        KvOptions(formats=("bf16",), rotation=True)


@given(dim=st.sampled_from([2, 20, 48, 64, 80, 256]), seed=st.integers(0, 2**31))
@settings(max_examples=25, deadline=None)
def test_hadamard_is_a_rotation(dim: int, seed: int) -> None:
    x, y = torch.randn(2, 3, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(kv_formats.hadamard(kv_formats.hadamard(x)), x)
    torch.testing.assert_close((kv_formats.hadamard(x) * kv_formats.hadamard(y)).sum(-1), (x * y).sum(-1))
    outlier = torch.zeros(dim, dtype=torch.float64)
    outlier[0] = 1.0
    assert kv_formats.hadamard(outlier).max() == pytest.approx((dim & -dim) ** -0.5)


@given(
    format=st.sampled_from(["fp8", "int8", "int4"]),
    dim=st.sampled_from([20, 32, 80]),
    seed=st.integers(0, 2**31),
    size=st.sampled_from([1e-4, 1.0, 1e3]),
)
@settings(max_examples=40, deadline=None)
def test_numbers_stay_within_a_step(format: str, dim: int, seed: int, size: float) -> None:
    x = torch.randn(4, dim, generator=torch.Generator().manual_seed(seed)) * size
    x[0] = 0.0
    error = (kv_formats.round_kv(x, format) - x).abs()
    largest = x.abs().amax(-1, keepdim=True)
    # int4 loses a whole step where a number is as large as the extreme of its group and of the other sign.
    bound = {"fp8": x.abs() / 16 + largest * 2.0**-18, "int8": largest / 253, "int4": largest * (1 / 8 + 1 / 128)}[format]
    assert (error <= bound).all()
    assert (error[0] == 0).all()


def test_a_query_keeps_sinks_and_its_neighbourhood() -> None:
    kept = kv_formats.is_kept(torch.arange(100), torch.arange(100))
    assert kept[:, :16].all()
    assert kept[79, 64:80].all()
    assert kept[79, 48:64].all()
    assert not kept[79, 16:48].any()
    assert kept[80, 64:81].all()
    assert not kept[80, 16:64].any()
