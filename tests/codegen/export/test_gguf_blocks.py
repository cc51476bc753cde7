"""Matrices on a grid keep every value in GGUF blocks, as the gguf package decodes them."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llmc.codegen.export.gguf_blocks import (
    BLOCK_GRIDS,
    exact_type,
    pack_codes_with_rounded_scale,
    pack_exact,
    pack_floats,
    quantize,
)
from llmc.formats.grid import BITS, GROUP_SIZES, Grid, QuantizedMatrix


def _decode(blocks: np.ndarray, type_name: str) -> np.ndarray:
    return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[type_name])


def _random(grid: Grid, n: int, k: int, seed: int) -> QuantizedMatrix:
    rng = np.random.default_rng(seed)
    codes = rng.integers(grid.low, grid.high + 1, (n, k)).astype(np.int8 if grid.symmetric else np.uint8)
    shape = (n, grid.num_groups(k))
    scale = rng.standard_normal(shape).astype(np.float32 if grid.group is None else np.float16)
    minimum = None if grid.symmetric else rng.standard_normal(shape).astype(np.float16)
    return QuantizedMatrix(grid=grid, codes=codes, scale=scale, minimum=minimum)


@settings(max_examples=60, deadline=None)
@given(
    bits=st.sampled_from(BITS),
    group=st.sampled_from(GROUP_SIZES),
    symmetric=st.booleans(),
    n=st.integers(1, 5),
    blocks=st.integers(1, 9),
    seed=st.integers(0, 1 << 16),
)
def test_codes_scales_and_minimums_are_kept(bits: int, group: int, symmetric: bool, n: int, blocks: int, seed: int) -> None:
    """Scales of either sign, a last group that is cut short, codes of fewer bits than the block's."""
    grid = Grid(bits=bits, group=group, symmetric=symmetric)
    type_name = exact_type(grid, 32 * blocks)
    if type_name is None:
        assert not symmetric
        assert bits > 5
        return
    assert BLOCK_GRIDS[type_name].bits - bits <= 2  # 3 bits in 4, 6 in 8
    value = _random(grid, n, 32 * blocks, seed)
    np.testing.assert_array_equal(_decode(pack_exact(value, type_name), type_name), value.dequantize())


def test_what_no_block_type_holds() -> None:
    assert exact_type(Grid(bits=8), 64) is None  # float32 scales
    assert exact_type(Grid(bits=4, group=32), 48) is None  # rows that are not whole blocks
    assert exact_type(Grid(bits=8, group=32, symmetric=False), 64) is None


def test_a_scale_a_row_costs_only_its_rounding_to_float16() -> None:
    value = _random(Grid(bits=8), 3, 96, 0)
    decoded = _decode(pack_codes_with_rounded_scale(value), "Q8_0")
    np.testing.assert_allclose(decoded, value.dequantize(), rtol=2**-11)


@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16"])
def test_floats_are_rounded_to_nearest(type_name: str) -> None:
    w = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    expected = w.to({"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[type_name]).float().numpy()
    np.testing.assert_array_equal(_decode(pack_floats(w, type_name), type_name), expected)


@pytest.mark.parametrize("type_name", BLOCK_GRIDS)
def test_the_search_beats_the_packages_own_rounding(type_name: str) -> None:
    w = torch.randn(16, 256, generator=torch.Generator().manual_seed(0))
    plain = gguf.quants.quantize(w.numpy(), gguf.GGMLQuantizationType[type_name])
    ours, theirs = (float(((_decode(b, type_name) - w.numpy()) ** 2).mean()) for b in (quantize(w, type_name), plain))
    assert ours <= theirs * 1.001
