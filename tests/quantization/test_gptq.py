from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llmc.errors import PassError
from llmc.formats.grid import Grid, QuantizedMatrix
from llmc.formats.round_to_nearest import round_to_nearest
from llmc.quantization import gptq as module
from llmc.quantization.gptq import gptq
from torch import Tensor

GRIDS = ("int3-g32", "int4-g32", "int4-g64-asym", "int5-g128", "int8", "int8-g32")


def grid_of(name: str) -> Grid:
    grid = Grid.parse(name)
    assert grid is not None
    return grid


def layer(n: int, k: int, tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Weights `[N, K]`, H of correlated inputs, and as many unseen inputs from the same source."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(k, k, generator=generator) * torch.arange(1, k + 1).rsqrt()[:, None]
    x = torch.randn(2 * tokens, k, generator=generator) @ mixing * torch.randn(k, generator=generator).mul(0.5).exp()
    seen, unseen = x[:tokens], x[tokens:]
    return torch.randn(n, k, generator=generator), 2 * seen.T @ seen / tokens, unseen


def output_error(w: Tensor, matrix: QuantizedMatrix, x: Tensor) -> float:
    return float(((torch.from_numpy(matrix.dequantize()) - w) @ x.T).square().sum() / (w @ x.T).square().sum())


def loss_of(w: Tensor, matrix: QuantizedMatrix, hessian: Tensor) -> float:
    delta = (torch.from_numpy(matrix.dequantize()) - w).double()
    return float((delta @ hessian.double() * delta).sum() / (w.double() @ hessian.double() * w.double()).sum())


def textbook(w: Tensor, hessian: Tensor, matrix: QuantizedMatrix, damping: float) -> Tensor:
    """The codes of Frantar et al.'s algorithm 1, one column at a time in float64 with the inverse of H, for the scales of `matrix`."""
    grid, (n, k) = matrix.grid, w.shape
    h = hessian.double()
    h = h + damping * h.diagonal().mean() * torch.eye(k, dtype=torch.float64)
    order = torch.argsort(hessian.diagonal(), stable=True).flip(0)
    upper = torch.linalg.cholesky(torch.linalg.inv(h[order][:, order]), upper=True)
    rest, codes = w.double()[:, order], torch.empty(n, k, dtype=torch.float64)
    for at, column in enumerate(order.tolist()):
        group = column // (grid.group or k)
        scale = torch.from_numpy(matrix.scale[:, group].astype(np.float64))
        low = torch.zeros(n) if matrix.minimum is None else torch.from_numpy(matrix.minimum[:, group].astype(np.float64))
        codes[:, column] = ((rest[:, at] - low) / scale).round().clamp(grid.low, grid.high)
        error = (rest[:, at] - codes[:, column] * scale - low) / upper[at, at]
        rest[:, at:] -= error[:, None] * upper[at, at:]
    return codes


@pytest.mark.parametrize("name", GRIDS)
def test_codes_are_those_of_the_paper(name: str) -> None:
    w, hessian, _ = layer(16, 160, 400)
    matrix, _ = gptq(w, hessian, grid_of(name), damping=0.01, block=48, sweeps=0)
    expected = textbook(w, hessian, matrix, 0.01)
    same = (torch.from_numpy(matrix.codes).double() == expected).all(1)
    assert same.float().mean() >= 0.9  # a tie that float32 breaks otherwise changes the rest of its row


@pytest.mark.parametrize("name", GRIDS)
def test_unseen_inputs_lose_less_than_by_rounding_to_nearest(name: str) -> None:
    w, hessian, unseen = layer(48, 192, 1536)
    grid = grid_of(name)
    matrix, record = gptq(w, hessian, grid)
    nearest = round_to_nearest(w, grid, hessian.diagonal())
    assert output_error(w, matrix, unseen) < 0.75 * output_error(w, nearest, unseen)
    assert record.loss == pytest.approx(loss_of(w, matrix, hessian), rel=1e-3)
    assert record.rtn_loss == pytest.approx(loss_of(w, nearest, hessian), rel=1e-3)
    assert (record.damping, record.retries, record.fell_back, record.dead_columns) == (0.1, 0, False, 0)


@pytest.mark.parametrize("name", ["int3-g32", "int4-g32-asym", "int4-g128"])
def test_each_sweep_lowers_the_damped_loss(name: str) -> None:
    w, hessian, unseen = layer(48, 200, 1600)
    damped = hessian + 0.1 * hessian.diagonal().mean() * torch.eye(200)
    runs = [gptq(w, hessian, grid_of(name), sweeps=sweeps)[0] for sweeps in (0, 1, 2, 5)]
    losses = [loss_of(w, matrix, damped) for matrix in runs]
    assert losses == sorted(losses, reverse=True)
    assert losses[2] < 0.98 * losses[0]
    assert output_error(w, runs[2], unseen) < output_error(w, runs[0], unseen)


@pytest.mark.parametrize("name", GRIDS)
def test_independent_inputs_leave_nothing_to_make_up_for(name: str) -> None:
    w = torch.randn(12, 160, generator=torch.Generator().manual_seed(1))
    matrix, _ = gptq(w, torch.eye(160), grid_of(name), sweeps=0)
    nearest = round_to_nearest(w, grid_of(name), torch.ones(160))
    assert np.array_equal(matrix.codes, nearest.codes)
    assert np.array_equal(matrix.scale, nearest.scale)


@pytest.mark.parametrize("name", ["int4-g32", "int4-g32-asym"])
def test_dead_columns_become_zeros_and_leave_the_rest_alone(name: str) -> None:
    w, hessian, _ = layer(8, 128, 512)
    dead = torch.zeros(128, dtype=torch.bool)
    dead[[0, 5, 127]] = True
    dead[64:96] = True  # a whole group
    hessian[dead] = 0
    hessian[:, dead] = 0
    matrix, record = gptq(w, hessian, grid_of(name))
    assert record.dead_columns == 35
    values = torch.from_numpy(matrix.dequantize())
    step = torch.from_numpy(matrix.scale.astype(np.float32)).abs().repeat_interleave(32, 1)
    assert (values[:, dead].abs() <= 0.5 * step[:, dead] + 1e-3).all()
    assert record.loss < record.rtn_loss < 0.02
    other = w.clone()
    other[:, dead] = 1e6  # what they held must not matter
    again, _ = gptq(other, hessian, grid_of(name))
    assert np.array_equal(again.codes, matrix.codes)


def test_no_input_at_all_gives_zeros() -> None:
    matrix, record = gptq(torch.randn(4, 40), torch.zeros(40, 40), grid_of("int4-g32"))
    assert not matrix.dequantize().any()
    assert (record.dead_columns, record.loss, record.rtn_loss) == (40, 0.0, 0.0)


def test_fewer_tokens_than_columns_are_damped() -> None:
    w, hessian, _ = layer(8, 128, 20)
    matrix, record = gptq(w, hessian, grid_of("int4-g32"), damping=0.01)
    assert not record.fell_back
    assert np.isfinite(matrix.dequantize()).all()
    assert record.loss < record.rtn_loss


def test_damping_is_raised_until_there_is_a_factor_and_said_so() -> None:
    hessian = torch.eye(64)
    hessian[0, 1] = hessian[1, 0] = 1.05
    _, record = gptq(torch.randn(4, 64), hessian, grid_of("int4-g32"), damping=0.01)
    assert (record.damping, record.retries, record.fell_back) == (pytest.approx(0.1), 1, False)


@pytest.mark.parametrize("off_diagonal", [1e6, float("nan")])
@pytest.mark.parametrize("name", ["int4-g32", "int4-g32-asym", "int8"])
def test_a_hopeless_matrix_is_rounded_to_nearest_and_said_so(off_diagonal: float, name: str) -> None:
    w, hessian = torch.randn(4, 64), torch.eye(64)
    hessian[3, 40] = hessian[40, 3] = off_diagonal
    matrix, record = gptq(w, hessian, grid_of(name))
    nearest = round_to_nearest(w, grid_of(name), hessian.diagonal())
    assert (record.retries, record.fell_back) == (3, True)
    assert np.array_equal(matrix.codes, nearest.codes)
    assert np.array_equal(matrix.scale, nearest.scale)


def test_float64_rescues_what_float32_cannot_factor() -> None:
    generator = torch.Generator().manual_seed(0)
    low_rank = torch.randn(4, 96, generator=generator) * 1e3
    hessian = low_rank.T @ low_rank
    hessian = (hessian + hessian.T) / 2
    _, record = gptq(torch.randn(4, 96, generator=generator), hessian, grid_of("int4-g32"), damping=2e-7)
    assert record.retries <= 1
    assert not record.fell_back


@pytest.mark.parametrize("name", ["int3-g32", "int4-g32-asym", "int8"])
def test_rows_do_not_depend_on_each_other(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    w, hessian, _ = layer(40, 96, 400)
    matrix, _ = gptq(w, hessian, grid_of(name))
    shuffled = torch.randperm(40, generator=torch.Generator().manual_seed(3))
    monkeypatch.setattr(module, "_ROW_VALUES", 96 * 7)  # and in blocks of rows, the last of which is short
    monkeypatch.setattr(module, "_MIN_ROWS", 7)
    other, _ = gptq(w[shuffled], hessian, grid_of(name))
    same = (other.codes == matrix.codes[shuffled.numpy()]).all(1)
    assert same.mean() >= 0.9  # sums in another order break some tie otherwise, which changes the rest of that row


def test_the_same_twice() -> None:
    w, hessian, _ = layer(20, 100, 300)
    kept = hessian.clone(), w.clone()
    first, second = (gptq(w, hessian, grid_of("int4-g32-asym")) for _ in range(2))
    assert first[1] == second[1]
    assert first[0].minimum is not None
    assert second[0].minimum is not None
    assert first[0].codes.tobytes() == second[0].codes.tobytes()
    assert first[0].scale.tobytes() + first[0].minimum.tobytes() == second[0].scale.tobytes() + second[0].minimum.tobytes()
    assert torch.equal(hessian, kept[0])
    assert torch.equal(w, kept[1])


@settings(max_examples=20, deadline=None)
@given(
    n=st.integers(1, 5),
    k=st.integers(1, 200),
    name=st.sampled_from([*GRIDS, "int4-g128-asym", "int6-g64"]),
    order=st.sampled_from(["static-act", "natural"]),
    block=st.sampled_from([1, 20, 128]),
    zero=st.booleans(),
    seed=st.integers(0, 5),
)
def test_any_shape_fits(n: int, k: int, name: str, order: Any, block: int, zero: bool, seed: int) -> None:
    w, hessian, _ = layer(n, k, 2 * k + 2, seed)
    if zero:
        w[0] = 0
        w[:, : k // 2] = 0.5  # groups of a single value
    matrix, record = gptq(w, hessian, grid_of(name), block=block, order=order)
    assert matrix.shape == (n, k)
    assert np.isfinite(matrix.dequantize()).all()
    if not zero and k >= 48:  # with fewer columns to make up for an error, rounding to nearest may be luckier
        damped = hessian + 0.1 * hessian.diagonal().mean() * torch.eye(k)
        assert loss_of(w, matrix, damped) < loss_of(w, round_to_nearest(w, grid_of(name), hessian.diagonal()), damped)
    assert record.loss >= 0


def test_half_precision_weights_are_taken_as_they_are() -> None:
    w, hessian, _ = layer(8, 64, 200)
    narrow = w.bfloat16()
    assert np.array_equal(
        gptq(narrow, hessian, grid_of("int4-g32"))[0].codes, gptq(narrow.float(), hessian, grid_of("int4-g32"))[0].codes
    )


def test_arguments_that_do_not_fit_are_refused() -> None:
    w, grid = torch.ones(2, 8), grid_of("int4-g32")
    with pytest.raises(PassError, match=r"gptq: H has shape \[9, 9\], expected \[8, 8\]"):
        gptq(w, torch.eye(9), grid)
    with pytest.raises(PassError, match=r"damping=0.*expected order one of static-act, natural"):
        gptq(w, torch.eye(8), grid, damping=0)
    w[1, 3] = float("nan")
    with pytest.raises(PassError, match="gptq: row 1 of the weights holds values that are not finite"):
        gptq(w, torch.eye(8), grid)
