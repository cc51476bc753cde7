"""Round-to-nearest: errors within half a step, searches that never lose, and groups without values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llmc.formats.grid import BITS, GROUP_SIZES, Grid
from llmc.formats.round_to_nearest import choose_scales, round_to_nearest

GRIDS = [
    Grid(bits=8),
    *(Grid(bits=b, group=g, symmetric=s) for b in BITS for g in GROUP_SIZES for s in (True, False)),
]


def _tailed(n: int, k: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_t(3, (n, k)).astype(np.float32)


def _error(w: Any, approximation: Any, weight: Any = 1.0) -> float:
    return float((weight * (w - approximation) ** 2).sum())


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 20), st.integers(1, 150), st.sampled_from(GRIDS), st.integers(0, 99))
def test_within_half_a_step_of_a_group(n: int, k: int, grid: Grid, seed: int) -> None:
    """And a group's step follows from its own values, so that outliers elsewhere in the row cost nothing."""
    w = _tailed(n, k, seed)
    matrix = round_to_nearest(w, grid, search=False)
    assert matrix.shape == (n, k)
    assert matrix.codes.min() >= grid.low
    assert matrix.codes.max() <= grid.high
    step = np.repeat(np.abs(matrix.scale.astype(np.float32)), grid.group or k, axis=1)[:, :k]
    # half a step, one where the range ends half a step early (no +2^(b-1)), and the rounding of scale and minimum to float16
    slack = 0.5 if not grid.symmetric or grid.bits == 8 else 1.0
    assert (np.abs(w - matrix.dequantize()) <= (slack + 2.0 ** (grid.bits - 11)) * step + 1e-3 * np.abs(w).max()).all()


def test_the_largest_weight_takes_the_lowest_code() -> None:
    w = np.linspace(-1.0, 1.0, 32, dtype=np.float32)[None] * np.float32(0.999)
    matrix = round_to_nearest(w, Grid(bits=4, group=32), search=False)
    assert matrix.codes.min() == -8
    assert abs(float(matrix.scale[0, 0])) == pytest.approx(0.999 / 8, rel=1e-3)


def test_groups_are_finer_than_rows() -> None:
    w = _tailed(20, 300)
    w[:, 0] = 100.0
    rows, groups = round_to_nearest(w, Grid(bits=8)), round_to_nearest(w, Grid(bits=8, group=32))
    assert np.abs(groups.codes.astype(int)).max() == 127
    assert _error(w[:, 32:], groups.dequantize()[:, 32:]) < 0.02 * _error(w[:, 32:], rows.dequantize()[:, 32:])


@pytest.mark.parametrize("grid", [g for g in GRIDS if g.bits < 8 and g.group != 64], ids=str)
def test_search_gains(grid: Grid) -> None:
    w = _tailed(24, 256)
    plain, searched = (_error(w, round_to_nearest(w, grid, search=search).dequantize()) for search in (False, True))
    assert searched < plain


@pytest.mark.parametrize("grid", [Grid(bits=3, group=32), Grid(bits=4, group=128, symmetric=False)], ids=str)
def test_importance_moves_the_error_where_it_costs_less(grid: Grid) -> None:
    w = _tailed(24, 256)
    importance = np.exp(np.random.default_rng(1).standard_normal(256) * 2).astype(np.float32)
    plain, weighted = round_to_nearest(w, grid), round_to_nearest(w, grid, torch.from_numpy(importance))
    assert _error(w, weighted.dequantize(), importance) < _error(w, plain.dequantize(), importance)
    assert _error(w, plain.dequantize()) < _error(w, weighted.dequantize())


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("search", [False, True])
def test_zeros_come_back_as_zeros(grid: Grid, search: bool) -> None:
    w = np.zeros((3, 130), np.float32)
    w[1, 64:] = 1.0  # a constant, whose range is empty
    matrix = round_to_nearest(w, grid, search=search)
    assert np.isfinite(matrix.scale).all()
    np.testing.assert_allclose(matrix.dequantize(), w, atol=4e-3)
    assert (matrix.dequantize()[[0, 2]] == 0).all()


def test_finer_grids_lose_less() -> None:
    w = _tailed(16, 256)
    errors = [_error(w, round_to_nearest(w, Grid(bits=bits, group=32)).dequantize()) for bits in BITS]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 2e-3 * errors[0]  # a step of 8 bits is a 32nd of one of 3


def test_scales_are_exact_in_float16_and_codes_follow_from_them() -> None:
    w = torch.from_numpy(_tailed(4, 64))
    grid = Grid(bits=5, group=32, symmetric=False)
    scales = choose_scales(w, grid)
    assert scales.minimum is not None
    assert (scales.scale.half().float() == scales.scale).all()
    assert (scales.minimum.half().float() == scales.minimum).all()
    columns = scales.codes(w[:, 32:40], 1, grid)  # of the second group
    np.testing.assert_array_equal(columns.numpy(), round_to_nearest(w, grid).codes[:, 32:40])
    assert float((scales.values(columns, 1) - w[:, 32:40]).abs().max()) < float(w.abs().max()) / 8
