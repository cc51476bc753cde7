"""AWQ: better outputs where a few channels matter, the identity where nothing can be gained, and no NaN from what is dead."""

from __future__ import annotations

import pytest
import torch
from llmc.formats.grid import Grid
from llmc.formats.round_to_nearest import round_to_nearest
from llmc.quantization.awq import Consumer, scale_at, search_scales
from torch import Tensor

_INT4 = Grid(bits=4, group=32)


def _inputs(k: int, salient: int, tokens: int = 512) -> Tensor:
    """Correlated inputs `[tokens, k]` of which `salient` channels are thirty times larger."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, k, generator=generator) @ (torch.eye(k) + 0.3 * torch.randn(k, k, generator=generator) / k**0.5)
    x[:, torch.randperm(k, generator=generator)[:salient]] *= 30
    return x


def _weights(n: int, k: int, seed: int = 1) -> Tensor:
    return 0.02 * torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


def _moment(x: Tensor) -> Tensor:
    return x.T @ x / len(x)


def _rounded(w: Tensor, grid: Grid, importance: Tensor | None = None, search: bool | None = None) -> Tensor:
    return torch.from_numpy(round_to_nearest(w, grid, importance, search=search).dequantize())


def _output_error(x: Tensor, w: Tensor, rounded: Tensor) -> float:
    return float((x @ (rounded - w).T).square().mean())


def test_beats_rounding_to_nearest_where_few_channels_are_salient() -> None:
    x, w = _inputs(128, salient=3), _weights(96, 128)
    moment = _moment(x)
    found = search_scales(x.abs().mean(0), moment, [Consumer(weight=w, grid=_INT4)])
    assert found.ratio is not None
    assert found.loss_after < 0.9 * found.loss_before  # before: the scale of each group is searched, weighted by the inputs
    rounded = _rounded(w * found.scale, _INT4, moment.diagonal() / found.scale.square()) / found.scale
    assert _output_error(x, w, rounded) < 0.3 * _output_error(x, w, _rounded(w, _INT4, search=False))


def test_default_loss_is_the_error_of_the_outputs() -> None:
    x, parts = _inputs(64, salient=2), [_weights(48, 64), _weights(32, 64, seed=2)]
    grids = [_INT4, Grid(bits=3, group=64, symmetric=False)]
    moment = _moment(x)
    consumers = [Consumer(weight=w, grid=grid) for w, grid in zip(parts, grids, strict=True)]
    found = search_scales(x.abs().mean(0), moment, consumers)
    s = found.scale
    for scale, loss in ((torch.ones(64), found.loss_before), (s, found.loss_after)):
        rounded = [
            _rounded(w * scale, grid, moment.diagonal() / scale.square()) / scale for w, grid in zip(parts, grids, strict=True)
        ]
        assert _output_error(x, torch.cat(parts), torch.cat(rounded)) == pytest.approx(loss, rel=1e-4)
    assert float(s.max() * s.min()) == pytest.approx(1.0, rel=1e-5)
    assert found.spread == pytest.approx(float(s.max() / s.min()))


def test_a_sample_of_rows_is_enough_and_a_second_run_finds_the_same() -> None:
    x, w = _inputs(64, salient=2), _weights(256, 64)
    arguments = (x.abs().mean(0), _moment(x), [Consumer(weight=w, grid=_INT4)])
    sampled, again = (search_scales(*arguments, sample_rows=64) for _ in range(2))
    assert torch.equal(sampled.scale, again.scale)
    assert (sampled.ratio, sampled.loss_after) == (again.ratio, again.loss_after)
    whole = search_scales(*arguments)
    importance = arguments[1].diagonal() / sampled.scale.square()
    rounded = _rounded(w * sampled.scale, _INT4, importance) / sampled.scale
    assert _output_error(x, w, rounded) < 1.05 * whole.loss_after  # the sample's own loss is another, its choice as good


def test_identity_is_kept_where_scaling_cannot_help() -> None:
    x = _inputs(64, salient=2)
    on_grid = _rounded(_weights(32, 64), _INT4)
    found = search_scales(x.abs().mean(0), _moment(x), [Consumer(weight=on_grid, grid=_INT4)])
    assert (found.ratio, found.loss_after) == (None, found.loss_before)
    assert torch.equal(found.scale, torch.ones(64))


def test_scales_that_the_producer_cannot_absorb_are_tied_before_they_are_measured() -> None:
    x, w = _inputs(64, salient=0), _weights(32, 64)
    x[:, [10, 42]] *= 30  # the same channel of both halves
    found = search_scales(
        x.abs().mean(0),
        _moment(x),
        [Consumer(weight=w, grid=_INT4)],
        tie=lambda s: s.view(2, 32).log().mean(0).exp().repeat(2),
    )
    assert found.ratio is not None
    assert torch.equal(found.scale[:32], found.scale[32:])


def test_dead_channels_zero_columns_and_zero_groups_keep_the_scale_one() -> None:
    x, w = _inputs(128, salient=2), _weights(48, 128)
    x[:, 5] = 0
    w[:, 7] = 0
    w[:, 32:64] = 0  # a whole group of every row
    w[3] = 0
    moment = _moment(x)
    found = search_scales(x.abs().mean(0), moment, [Consumer(weight=w, grid=_INT4)])
    assert torch.isfinite(found.scale).all()
    assert found.ratio is not None
    assert (found.scale[[5, 7, *range(32, 64)]] == 1).all()
    nothing = search_scales(torch.zeros(128), torch.zeros(128, 128), [Consumer(weight=w, grid=_INT4)])
    assert (nothing.ratio, nothing.loss_after) == (None, 0.0)


def test_scale_follows_the_formula() -> None:
    x_mean, w_mean = torch.tensor([1.0, 16.0, 4.0]), torch.tensor([0.25, 0.5, 1.0])
    raw = x_mean.sqrt() / (w_mean.sqrt() + 1e-4)
    torch.testing.assert_close(scale_at(0.5, x_mean, w_mean), raw / (raw.max() * raw.min()).sqrt())
    assert torch.equal(scale_at(0.5, torch.full((3,), float("nan")), w_mean), torch.ones(3))
