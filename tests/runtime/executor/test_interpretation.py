"""The interpreter rounds as devices do: to the nearest, ties to even, without losing a carry."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from llmc.runtime.executor.interpretation import InterpretedKernel, Pointer

_SOURCE = """
import triton
import triton.language as tl


@triton.jit
def convert(x, out, count):
    i = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    tl.store(out + i, tl.load(x + i, mask=i < count, other=0.0).to(tl.TYPE), mask=i < count)
"""
_TYPES = {
    "bf16": ("bfloat16", ml_dtypes.bfloat16, 3e38),
    "fp8e4nv": ("float8e4nv", ml_dtypes.float8_e4m3fn, 448.0),
    "fp8e4b8": ("float8e4b8", ml_dtypes.float8_e4m3fnuz, 240.0),
}


@pytest.mark.parametrize("type", _TYPES)
def test_conversions_round_to_the_nearest_number(type: str) -> None:
    name, number, largest = _TYPES[type]
    grid = np.arange(1 << 8 * np.dtype(number).itemsize).astype(f"u{np.dtype(number).itemsize}").view(number).astype(np.float32)
    grid = np.unique(grid[np.isfinite(grid) & (np.abs(grid) <= largest)])
    middle = ((grid[1:].astype(np.float64) + grid[:-1]) / 2).astype(np.float32)  # ties
    random = np.random.default_rng(0).standard_normal(3000).astype(np.float32)
    x = np.clip(np.concatenate([grid[:2000], middle[:2000], random * 40, random * 1e-3]), -largest, largest).astype(np.float32)
    out = np.zeros(len(x), np.dtype(f"u{np.dtype(number).itemsize}"))
    kernel = InterpretedKernel(_SOURCE.replace("TYPE", name), "convert", "convert.py")
    kernel.launch((-(-len(x) // 1024), 1, 1), [Pointer(x.ctypes.data, "*fp32"), Pointer(out.ctypes.data, f"*{type}"), len(x)])
    found = out.view(number).astype(np.float64)
    below = grid[np.clip(np.searchsorted(grid, x, side="right") - 1, 0, len(grid) - 1)].astype(np.float64)
    above = grid[np.clip(np.searchsorted(grid, x), 0, len(grid) - 1)].astype(np.float64)
    np.testing.assert_array_equal(np.abs(found - x), np.minimum(np.abs(below - x), np.abs(above - x)))
    ties = (np.abs(below - x) == np.abs(above - x)) & (below != above)
    assert ties.sum() > 50
    assert (out[ties] % 2 == 0).all()
