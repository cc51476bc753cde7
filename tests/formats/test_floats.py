"""bfloat16 and fp8: the nearest value, and what has none."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llmc.formats.floats import from_bf16, from_fp8, quantize_fp8, round_up, row_slices, to_bf16


def test_bf16_rounds_to_even_and_keeps_nan() -> None:
    values = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, -np.inf, np.nan, 3.4e38], np.float32)
    got = from_bf16(to_bf16(values))
    np.testing.assert_array_equal(got[:4], [1.0, 1.0, 1 + 2**-6, -np.inf])
    assert np.isnan(got[4])
    assert np.isinf(got[5])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=20))
def test_bf16_is_torchs(numbers: list[float]) -> None:
    values = np.array(numbers, np.float32)
    want = torch.from_numpy(values).to(torch.bfloat16)
    np.testing.assert_array_equal(to_bf16(values).view(np.int16), want.view(torch.int16).numpy())


@pytest.mark.parametrize("fnuz", [False, True])
def test_fp8_is_the_nearest_value(fnuz: bool) -> None:
    w = np.random.default_rng(0).standard_normal((9, 70)).astype(np.float32)
    w[4] *= 1e-6  # rows of very different size
    bits, scale = quantize_fp8(w, fnuz=fnuz)
    dtype = torch.float8_e4m3fnuz if fnuz else torch.float8_e4m3fn
    grid = torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.float32).numpy()
    grid = grid[np.isfinite(grid)]
    scaled = w / scale[:, None]
    nearest = np.abs(scaled[..., None] - grid).min(-1)
    got = from_fp8(bits, fnuz=fnuz)
    np.testing.assert_allclose(np.abs(got - scaled), nearest, atol=1e-4)
    assert np.abs(got).max() == (240 if fnuz else 448)


def test_fp8_keeps_rows_of_zeros() -> None:
    bits, scale = quantize_fp8(np.zeros((3, 40), np.float32), fnuz=False)
    assert (from_fp8(bits, fnuz=False) == 0).all()
    assert np.isfinite(scale).all()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 300), st.integers(1, 500), st.integers(1, 2000))
def test_slices_cover_all_rows_once(n: int, k: int, values: int) -> None:
    slices = list(row_slices(n, k, values))
    assert [row for part in slices for row in range(part.start, part.stop)] == list(range(n))
    assert all((part.stop - part.start) * k <= max(values, k) for part in slices)


def test_round_up() -> None:
    assert [round_up(value, 64) for value in (0, 1, 64, 65)] == [0, 64, 64, 128]
