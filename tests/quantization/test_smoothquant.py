"""SmoothQuant: outliers of activations cost less, and what is dead or cannot be helped is left alone."""

from __future__ import annotations

import pytest
import torch
from llmc.errors import UsageError
from llmc.quantization.pairs import AbsorbPair, Kind, Rows
from llmc.quantization.smoothquant import FORMATS, applies_to, search_strength, smooth_scales, strength_for
from torch import Tensor


def _outliers() -> tuple[Tensor, list[Tensor]]:
    """Inputs `[96, 64]` with three channels fifty times larger, and two weights that read them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(96, 64, generator=generator)
    x[:, [3, 17, 40]] *= 50
    return x, [0.05 * torch.randn(rows, 64, generator=generator) for rows in (48, 32)]


def test_scale_follows_the_formula() -> None:
    weights = [torch.tensor([[1.0, -2.0, 0.1], [0.5, 1.0, 0.2]]), torch.tensor([[0.0, 0.0, -0.4]])]
    x_amax = torch.tensor([10.0, 1.0, 3.0])
    raw = x_amax.pow(0.75) / torch.tensor([1.0, 2.0, 0.4]).pow(0.25)
    torch.testing.assert_close(smooth_scales(x_amax, weights, 0.75), raw / (raw.max() * raw.min()).sqrt())


def test_dead_channels_and_unread_channels() -> None:
    x, weights = _outliers()
    x[:, 5] = 0
    for weight in weights:
        weight[:, 9] = 0
    scale = smooth_scales(x.abs().amax(0), weights, 0.8)
    assert torch.isfinite(scale).all()
    assert scale[5] == 1
    assert scale[9] == scale.max()  # the input is divided by it
    assert torch.equal(smooth_scales(torch.zeros(64), weights, 0.8), torch.ones(64))


@pytest.mark.parametrize(("format", "gain"), [("w8a8", 0.25), ("fp8", 0.99), ("fp8-fnuz", 0.99)])
def test_outliers_cost_less(format: str, gain: float) -> None:
    x, weights = _outliers()
    found = search_strength(x, x.abs().amax(0), weights, format)
    again = search_strength(x, x.abs().amax(0), weights, format)
    assert found.strength is not None
    assert found.loss_after < gain * found.loss_before
    assert torch.equal(found.scale, smooth_scales(x.abs().amax(0), weights, found.strength))
    assert torch.equal(found.scale, again.scale)
    assert found.spread == pytest.approx(float(found.scale.max() / found.scale.min()))


def test_identity_is_kept_where_smoothing_cannot_help() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 64, generator=generator)
    x, weight = x / x.abs().amax(0), torch.randn(16, 64, generator=generator)
    weight = weight / weight.abs().amax(0)  # every channel alike on both sides
    found = search_strength(x, x.abs().amax(0), [weight], "w8a8")
    assert (found.strength, found.loss_after) == (None, found.loss_before)
    assert torch.equal(found.scale, torch.ones(64))


def test_a_given_loss_decides() -> None:
    x, weights = _outliers()
    wanted = smooth_scales(x.abs().amax(0), weights, 0.6)
    found = search_strength(x, x.abs().amax(0), weights, "w8a8", loss=lambda s: float((s.log() - wanted.log()).square().sum()))
    assert (found.strength, found.loss_after) == (0.6, 0.0)


def test_only_norms_before_linears_with_rounded_inputs() -> None:
    def pair(kind: Kind) -> AbsorbPair:
        rows = (Rows(name="a", start=0, stop=8),)
        return AbsorbPair(kind=kind, producer=rows, offset=0.0, consumers=("b",), width=8, groups=1, head_dim=8)

    assert all(applies_to(pair("norm-linear"), format) for format in FORMATS)
    assert not any(applies_to(pair("norm-linear"), format) for format in ("int8", "int4-g32", "w4a16-g128", "bf16"))
    assert not applies_to(pair("up-down"), "w8a8")
    assert not applies_to(pair("v-o"), "w8a8")


def test_strengths_by_model() -> None:
    assert (strength_for("llama"), strength_for("mistral"), strength_for("qwen3")) == (0.85, 0.8, 0.8)


def test_refuses_formats_and_strengths_it_is_not_for() -> None:
    x, weights = _outliers()
    with pytest.raises(UsageError, match="format 'int4-g32' does not round activations to 8 bits; choose one of w8a8, fp8"):
        search_strength(x, x.abs().amax(0), weights, "int4-g32")
    with pytest.raises(UsageError, match=r"strength is 1\.5, expected 0"):
        smooth_scales(x.abs().amax(0), weights, 1.5)
