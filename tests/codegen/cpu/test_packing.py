"""Layouts byte by byte, round trips, and the error of the quantisers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llmc.codegen.cpu import packing


def _w(n: int, k: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32)


sizes = st.tuples(st.integers(1, 70), st.integers(1, 200))


@settings(max_examples=40, deadline=None)
@given(sizes)
def test_f32_and_bf16_round_trip(size: tuple[int, int]) -> None:
    n, k = size
    w = _w(n, k)
    data = packing.pack_f32(w)
    assert data.shape == (-(-n // 16), packing.round_up(k, 64), 16)
    np.testing.assert_array_equal(packing.unpack("f32", data, None, n, k), w)
    half = packing.to_bf16(w)
    packed = packing.pack_bf16(half)
    assert packed.shape == (-(-n // 16), packing.round_up(k, 64) // 2, 16, 2)
    np.testing.assert_array_equal(packing.unpack("bf16", packed, None, n, k), packing.from_bf16(half))
    assert data.sum(dtype=np.float64) == pytest.approx(w.sum(dtype=np.float64), abs=1e-3)  # padding is zero
    assert packed.astype(np.int64).sum() == half.astype(np.int64).sum()


@settings(max_examples=40, deadline=None)
@given(sizes, st.sampled_from([32, 64, 128]))
def test_integers_round_trip(size: tuple[int, int], group: int) -> None:
    n, k = size
    q, scale = packing.quantize_int8(_w(n, k))
    data, scales = packing.pack_int8(q, scale)
    assert data.shape == (-(-n // 16), packing.round_up(k, 64) // 4, 16, 4)
    assert scales.shape == (packing.round_up(n, 16),)
    np.testing.assert_array_equal(packing.unpack("i8", data, scales, n, k), q * scale[:, None])
    assert data.astype(np.int64).sum() == q.astype(np.int64).sum() + 128 * data.size

    q4, scale4 = packing.quantize_int4(_w(n, k), group)
    data4, scales4 = packing.pack_int4(q4, scale4)
    groups = packing.num_groups(k, group)
    assert data4.shape == (-(-n // 16), packing.round_up(k, 64) // 8, 16, 4)
    assert scales4.shape == (-(-n // 16), groups, 16)
    want = q4 * np.repeat(scale4.astype(np.float32), group, axis=1)[:, :k]
    np.testing.assert_array_equal(packing.unpack("i4", data4, scales4, n, k, group), want)


def test_layouts_are_those_of_the_document() -> None:
    w = np.arange(32 * 64, dtype=np.float32).reshape(32, 64)
    assert packing.pack_f32(w)[1, 5, 3] == w[19, 5]
    assert packing.from_bf16(packing.pack_bf16(packing.to_bf16(w)))[1, 2, 3, 1] == packing.from_bf16(packing.to_bf16(w[19, 5]))
    q = (np.arange(32 * 64) % 255 - 127).astype(np.int8).reshape(32, 64)
    data, _ = packing.pack_int8(q, np.ones(32, np.float32))
    assert int(data[1, 3, 2, 1]) - 128 == q[18, 13]
    q4 = (np.arange(32 * 64) % 16 - 8).astype(np.int8).reshape(32, 64)
    scale = np.arange(64, dtype=np.float16).reshape(32, 2)
    data4, scales = packing.pack_int4(q4, scale)
    assert int(data4[1, 3, 2, 1] & 15) - 8 == q4[18, 25]
    assert int(data4[1, 3, 2, 1] >> 4) - 8 == q4[18, 29]
    assert scales[1, 1, 2] == scale[18, 1]


def test_gate_and_up_alternate() -> None:
    gate, up = packing.pack_f32(_w(20, 64, 1)), packing.pack_f32(_w(20, 64, 2))
    pair = packing.interleave(gate, up)
    np.testing.assert_array_equal(pair[0], gate[0])
    np.testing.assert_array_equal(pair[1], up[0])
    np.testing.assert_array_equal(pair[2], gate[1])
    again = packing.deinterleave(pair)
    np.testing.assert_array_equal(again[0], gate)
    np.testing.assert_array_equal(again[1], up)
    scales = packing.interleave(np.zeros(32, np.float32), np.ones(32, np.float32))
    np.testing.assert_array_equal(scales, np.repeat([0.0, 1.0, 0.0, 1.0], 16))


def test_bf16_rounds_to_even_and_keeps_nan() -> None:
    values = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, -np.inf, np.nan, 3.4e38], np.float32)
    got = packing.from_bf16(packing.to_bf16(values))
    np.testing.assert_array_equal(got[:4], [1.0, 1.0, 1 + 2**-6, -np.inf])
    assert np.isnan(got[4])
    assert np.isinf(got[5])


def _error(w: Any, approximation: Any) -> float:
    return float(((w - approximation) ** 2).sum())


@pytest.mark.parametrize("group", [32, 128])
def test_search_never_loses(group: int) -> None:
    w = np.random.default_rng(0).standard_t(3, (64, 256)).astype(np.float32)
    errors = []
    for search in (False, True):
        q, scale = packing.quantize_int8(w, search=search)
        q4, scale4 = packing.quantize_int4(w, group, search=search)
        wide = np.repeat(scale4.astype(np.float32), group, axis=1)
        errors.append((_error(w, q * scale[:, None]), _error(w, q4 * wide)))
    assert errors[1][0] <= errors[0][0]
    assert errors[1][1] < errors[0][1]


def test_zero_rows_quantise_to_zero() -> None:
    w = np.zeros((3, 64), np.float32)
    assert (packing.quantize_int8(w, search=True)[0] == 0).all()
    q, scale = packing.quantize_int4(w, 32, search=True)
    assert (q == 0).all()
    assert (scale == 0).all()


def test_largest_weight_uses_the_sixteenth_level() -> None:
    w = np.linspace(-1.0, 1.0, 32, dtype=np.float32)[None]
    q, scale = packing.quantize_int4(w * np.float32(0.999), 32)
    assert q.min() == -8
    assert abs(float(scale[0, 0])) == pytest.approx(0.999 / 8, rel=1e-3)
