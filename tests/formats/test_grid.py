"""Grids by name, and quantised matrices that hold together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from llmc.formats.grid import BITS, GROUP_SIZES, Grid, QuantizedMatrix, num_groups, stack

GRIDS = [
    Grid(bits=8),
    *(Grid(bits=b, group=g, symmetric=s) for b in BITS for g in GROUP_SIZES for s in (True, False)),
]


def _matrix(grid: Grid, n: int, k: int, seed: int = 0) -> QuantizedMatrix:
    rng = np.random.default_rng(seed)
    groups = (n, grid.num_groups(k))
    return QuantizedMatrix(
        grid=grid,
        codes=rng.integers(grid.low, grid.high + 1, (n, k)).astype(np.int8 if grid.symmetric else np.uint8),
        scale=rng.standard_normal(groups).astype(np.float32 if grid.group is None else np.float16),
        minimum=None if grid.symmetric else rng.standard_normal(groups).astype(np.float16),
    )


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_names_round_trip(grid: Grid) -> None:
    assert Grid.parse(str(grid)) == grid
    assert grid.high - grid.low == (1 << grid.bits) - (2 if grid == Grid(bits=8, group=grid.group) else 1)


@pytest.mark.parametrize(
    ("name", "grid"),
    [
        ("w8a8", Grid(bits=8)),
        ("w4a16-g64", Grid(bits=4, group=64)),
        ("int5-g128-asym", Grid(bits=5, group=128, symmetric=False)),
        *((name, None) for name in ("int4", "int8-asym", "int7-g32", "int4-g16", "bf16", "fp8", "int4-g32-sym", "")),
    ],
)
def test_names_of_formats(name: str, grid: Grid | None) -> None:
    assert Grid.parse(name) == grid


@pytest.mark.parametrize(
    "fields", [{"bits": 7}, {"bits": 4}, {"bits": 8, "symmetric": False}, {"bits": 4, "group": 16}, {"bits": 2, "group": 32}]
)
def test_no_such_grid(fields: Any) -> None:
    with pytest.raises(ValueError, match="grid of"):
        Grid(**fields)


def test_groups_are_counted_after_padding() -> None:
    assert [num_groups(k, 32) for k in (1, 64, 65)] == [2, 2, 4]
    assert [num_groups(k, 128) for k in (1, 64, 65, 129)] == [1, 1, 1, 2]
    assert Grid(bits=8).num_groups(1000) == 1


@pytest.mark.parametrize("grid", [Grid(bits=8), Grid(bits=4, group=64), Grid(bits=3, group=32, symmetric=False)], ids=str)
def test_values_are_codes_times_scale_plus_minimum(grid: Grid) -> None:
    matrix = _matrix(grid, 5, 130)
    values = matrix.dequantize()
    for n, k in ((0, 0), (4, 129), (2, 70)):
        group = k // (grid.group or 130)
        want = np.float32(matrix.codes[n, k]) * np.float32(matrix.scale[n, group])
        want += 0 if matrix.minimum is None else np.float32(matrix.minimum[n, group])
        assert values[n, k] == want
    np.testing.assert_array_equal(matrix.rows(1, 3).dequantize(), values[1:3])
    np.testing.assert_array_equal(stack([matrix.rows(0, 2), matrix.rows(2, 5)]).dequantize(), values)


def test_bytes_are_those_of_codes_and_scales() -> None:
    assert Grid(bits=4, group=32).num_bytes(10, 64) == 10 * 64 // 2 + 10 * 2 * 2
    assert Grid(bits=3, group=32, symmetric=False).num_bytes(10, 64) == 10 * 64 * 3 // 8 + 10 * 2 * 4
    assert Grid(bits=8).num_bytes(10, 100) == 1000 + 40


def test_parts_that_do_not_fit_are_refused() -> None:
    grid = Grid(bits=4, group=32)
    codes, scale = np.zeros((2, 64), np.int8), np.zeros((2, 2), np.float16)
    QuantizedMatrix(grid=grid, codes=codes, scale=scale)
    with pytest.raises(ValueError, match=r"scales have shape \(2, 1\), expected \(2, 2\)"):
        QuantizedMatrix(grid=grid, codes=codes, scale=scale[:, :1])
    with pytest.raises(ValueError, match="types are"):
        QuantizedMatrix(grid=grid, codes=codes, scale=scale.astype(np.float32))
    with pytest.raises(ValueError, match="types are"):
        QuantizedMatrix(grid=grid, codes=codes, scale=scale, minimum=scale)
    with pytest.raises(ValueError, match="types are"):
        QuantizedMatrix(grid=Grid(bits=4, group=32, symmetric=False), codes=codes.view(np.uint8), scale=scale)
