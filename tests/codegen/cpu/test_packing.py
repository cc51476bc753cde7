"""Layouts byte by byte, round trips, and the error of the quantisers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llmc.codegen import quantizers
from llmc.codegen.cpu import packing
from llmc.codegen.cpu.formats import MatrixFormat
from llmc.codegen.cpu.weight_layout import StoredWeight
from llmc.errors import UsageError


def _w(n: int, k: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32)


sizes = st.tuples(st.integers(1, 70), st.integers(1, 200))


@settings(max_examples=40, deadline=None)
@given(sizes)
def test_f32_and_bf16_round_trip(size: tuple[int, int]) -> None:
    n, k = size
    w = _w(n, k)
    data = packing.pack_f32(w)
    assert data.shape == (-(-n // 16), quantizers.round_up(k, 64), 16)
    np.testing.assert_array_equal(packing.unpack("f32", data, None, n, k), w)
    half = quantizers.to_bf16(w)
    packed = packing.pack_bf16(half)
    assert packed.shape == (-(-n // 16), quantizers.round_up(k, 64) // 2, 16, 2)
    np.testing.assert_array_equal(packing.unpack("bf16", packed, None, n, k), quantizers.from_bf16(half))
    assert data.sum(dtype=np.float64) == pytest.approx(w.sum(dtype=np.float64), abs=1e-3)  # padding is zero
    assert packed.astype(np.int64).sum() == half.astype(np.int64).sum()


@settings(max_examples=40, deadline=None)
@given(sizes, st.sampled_from([32, 64, 128]))
def test_integers_round_trip(size: tuple[int, int], group: int) -> None:
    n, k = size
    q, scale = quantizers.quantize_int8(_w(n, k))
    data, scales = packing.pack_int8(q, scale)
    assert data.shape == (-(-n // 16), quantizers.round_up(k, 64) // 4, 16, 4)
    assert scales.shape == (quantizers.round_up(n, 16),)
    np.testing.assert_array_equal(packing.unpack("i8", data, scales, n, k), q * scale[:, None])
    assert data.astype(np.int64).sum() == q.astype(np.int64).sum() + 128 * data.size

    groups = quantizers.num_groups(k, group)
    q8, scale8 = quantizers.quantize_int8_groups(_w(n, k), group)
    data8, scales8 = packing.pack_int8_groups(q8, scale8)
    assert (data8.shape, scales8.shape) == (data.shape, (-(-n // 16), groups, 16))
    want = q8 * np.repeat(scale8.astype(np.float32), group, axis=1)[:, :k]
    np.testing.assert_array_equal(packing.unpack("i8g", data8, scales8, n, k, group), want)
    assert data8.astype(np.int64).sum() == q8.astype(np.int64).sum() + 128 * data8.size

    q4, scale4 = quantizers.quantize_int4(_w(n, k), group)
    data4, scales4 = packing.pack_int4(q4, scale4)
    assert data4.shape == (-(-n // 16), quantizers.round_up(k, 64) // 8, 16, 4)
    assert scales4.shape == (-(-n // 16), groups, 16)
    want = q4 * np.repeat(scale4.astype(np.float32), group, axis=1)[:, :k]
    np.testing.assert_array_equal(packing.unpack("i4", data4, scales4, n, k, group), want)


def test_layouts_are_those_of_the_document() -> None:
    w = np.arange(32 * 64, dtype=np.float32).reshape(32, 64)
    assert packing.pack_f32(w)[1, 5, 3] == w[19, 5]
    assert quantizers.from_bf16(packing.pack_bf16(quantizers.to_bf16(w)))[1, 2, 3, 1] == quantizers.from_bf16(quantizers.to_bf16(w[19, 5]))
    q = (np.arange(32 * 64) % 255 - 127).astype(np.int8).reshape(32, 64)
    data, _ = packing.pack_int8(q, np.ones(32, np.float32))
    assert int(data[1, 3, 2, 1]) - 128 == q[18, 13]
    data, scales = packing.pack_int8_groups(q, np.arange(64, dtype=np.float16).reshape(32, 2))
    assert int(data[1, 3, 2, 1]) - 128 == q[18, 13]
    assert scales[1, 1, 2] == 18 * 2 + 1
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
    got = quantizers.from_bf16(quantizers.to_bf16(values))
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
        q, scale = quantizers.quantize_int4(w, group, search=search)
        errors.append(_error(w, q * np.repeat(scale.astype(np.float32), group, axis=1)))
    assert errors[1] < errors[0]


@pytest.mark.parametrize("group", [32, 64, 128])
def test_int8_groups_are_within_half_a_step(group: int) -> None:
    """And a group's step is of its own largest weight, so that outliers elsewhere in the row cost nothing."""
    w = np.random.default_rng(0).standard_t(3, (20, 300)).astype(np.float32)
    w[:, 0] = 100.0
    q, scale = quantizers.quantize_int8_groups(w, group)
    wide = np.repeat(scale.astype(np.float32), group, axis=1)[:, :300]
    assert np.abs(q.astype(int)).max() == 127
    assert (np.abs(w - q * wide) <= 0.57 * wide).all()  # a scale rounded down clips by 127 / 2048 of a step
    rows, row_scale = quantizers.quantize_int8(w)
    assert _error(w[:, group:], (q * wide)[:, group:]) < 0.02 * _error(w[:, group:], (rows * row_scale[:, None])[:, group:])


def test_zero_rows_quantise_to_zero() -> None:
    w = np.zeros((3, 64), np.float32)
    assert (quantizers.quantize_int8(w)[0] == 0).all()
    for q, scale in (quantizers.quantize_int8_groups(w, 32), quantizers.quantize_int4(w, 32, search=True)):
        assert (q == 0).all()
        assert (scale == 0).all()


@pytest.mark.parametrize("name", ["f32", "bf16", "int8", "int8-g32", "int8-g128", "int4-g64"])
def test_format_names_round_trip(name: str) -> None:
    format = MatrixFormat.parse(name)
    assert str(format) == name
    w = _w(40, 130)  # an odd number of blocks, and of groups of 64
    stored = StoredWeight(name="w", shape=w.shape, format=format)
    tensors = stored.tensors(w)
    sizes = {"F32": 4, "BF16": 2, "F16": 2, "U8": 1}
    assert [(list(t.shape), t.itemsize) for t in tensors] == [(s.shape, sizes[s.dtype]) for s in stored.specs()]
    assert stored.num_bytes() == sum(t.nbytes for t in tensors)
    assert all(t.nbytes % 64 == 0 for t in tensors)
    np.testing.assert_allclose(format.unpack(tensors, w.shape), w, atol=0.02 if "int4" not in name else 0.7)


@pytest.mark.parametrize("name", ["int4", "int8-g", "int8-gx", "bf16-g32", "i8"])
def test_unknown_format_names(name: str) -> None:
    with pytest.raises(UsageError, match="formats are"):
        MatrixFormat.parse(name)


def test_largest_weight_uses_the_sixteenth_level() -> None:
    w = np.linspace(-1.0, 1.0, 32, dtype=np.float32)[None]
    q, scale = quantizers.quantize_int4(w * np.float32(0.999), 32)
    assert q.min() == -8
    assert abs(float(scale[0, 0])) == pytest.approx(0.999 / 8, rel=1e-3)
