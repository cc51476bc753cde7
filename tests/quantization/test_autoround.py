from __future__ import annotations

import numpy as np
import pytest
import torch
from llmc.errors import PassError
from llmc.formats.grid import Grid, QuantizedMatrix
from llmc.formats.round_to_nearest import round_to_nearest
from llmc.quantization import autoround as module
from llmc.quantization.autoround import autoround
from torch import Tensor


def grid_of(name: str) -> Grid:
    grid = Grid.parse(name)
    assert grid is not None
    return grid


def inputs(tokens: int, k: int, seed: int) -> Tensor:
    """Correlated inputs; the seed settles which, the source is the same for all."""
    mixing = torch.randn(k, k, generator=torch.Generator().manual_seed(99)) * torch.arange(1, k + 1).rsqrt()[:, None]
    return torch.randn(tokens, k, generator=torch.Generator().manual_seed(seed)) @ mixing


def weights(n: int, k: int, seed: int = 0) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


def output_error(w: Tensor, matrix: QuantizedMatrix, x: Tensor) -> float:
    return float(((torch.from_numpy(matrix.dequantize()) - w) @ x.T).square().sum() / (w @ x.T).square().sum())


@pytest.mark.parametrize("name", ["int3-g32", "int4-g32", "int4-g64-asym", "int8"])
def test_a_layer_learns_to_lose_less_on_unseen_inputs(name: str) -> None:
    w, x, unseen = weights(24, 160), inputs(1200, 160, 1), inputs(1200, 160, 2)
    hessian = 2 * x.T @ x / len(x)
    matrix, record = autoround(w, hessian, grid_of(name))
    nearest = round_to_nearest(w, grid_of(name), hessian.diagonal())
    assert output_error(w, matrix, unseen) < 0.8 * output_error(w, nearest, unseen)
    assert record.loss < 0.8 * record.loss_before
    assert 100 < record.best_step <= 200


def test_the_loss_recorded_is_that_of_the_matrix_returned() -> None:
    w, x = weights(10, 100), inputs(400, 100, 1)
    hessian = 2 * x.T @ x / len(x)
    for name in ("int4-g32", "int4-g32-asym"):
        matrix, record = autoround(w, hessian, grid_of(name), steps=30)
        ridge = hessian + 0.1 * hessian.diagonal().mean() * torch.eye(100)
        delta = torch.from_numpy(matrix.dequantize()) - w
        assert record.loss == pytest.approx(float((delta @ ridge * delta).sum() / (w @ ridge * w).sum()), rel=1e-4)


def test_rows_are_learnt_alone_and_the_same_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    w, x = weights(20, 96), inputs(300, 96, 1)
    hessian = 2 * x.T @ x / len(x)
    matrix, _ = autoround(w, hessian, grid_of("int4-g32"), steps=20)
    again, _ = autoround(w, hessian, grid_of("int4-g32"), steps=20)
    assert matrix.codes.tobytes() + matrix.scale.tobytes() == again.codes.tobytes() + again.scale.tobytes()
    monkeypatch.setattr(module, "_ROW_VALUES", 96 * 6)
    blocks, _ = autoround(w, hessian, grid_of("int4-g32"), steps=20)
    assert (blocks.codes == matrix.codes).mean() > 0.99


@pytest.mark.parametrize("name", ["int4-g32", "int4-g32-asym", "int4-g128", "int8"])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (3, 20), (2, 100)])
def test_odd_shapes_and_groups_of_one_value(name: str, n: int, k: int) -> None:
    w, x = weights(n, k), inputs(50, k, 1)
    w[0] = 0.25
    w[-1, : k // 2] = 0
    matrix, record = autoround(w, 2 * x.T @ x / 50, grid_of(name), steps=10)
    assert matrix.shape == (n, k)
    assert np.isfinite(matrix.dequantize()).all()
    assert 0 <= record.loss <= record.loss_before


def test_arguments_that_do_not_fit_are_refused() -> None:
    w, grid = torch.ones(2, 8), grid_of("int4-g32")
    with pytest.raises(PassError, match=r"autoround: H has shape \[9, 9\], expected \[8, 8\]"):
        autoround(w, torch.eye(9), grid)
    with pytest.raises(PassError, match="autoround: steps=0"):
        autoround(w, torch.eye(8), grid, steps=0)
    with pytest.raises(PassError, match="autoround: the loss is not finite"):
        autoround(torch.full((2, 8), torch.nan), torch.eye(8), grid)
