"""Layouts byte by byte, and round trips of every format and of odd shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llmc.codegen.cpu import packing
from llmc.codegen.cpu.formats import MatrixFormat, decode_matrix
from llmc.codegen.cpu.weight_layout import StoredWeight
from llmc.errors import UsageError
from llmc.formats.floats import from_bf16, round_up, to_bf16
from llmc.formats.grid import BITS, GROUP_SIZES, Grid, QuantizedMatrix
from llmc.formats.round_to_nearest import round_to_nearest

GRIDS = [
    Grid(bits=8),
    *(Grid(bits=b, group=g, symmetric=s) for b in BITS for g in GROUP_SIZES for s in (True, False)),
]
sizes = st.tuples(st.integers(1, 70), st.integers(1, 200))


def _w(n: int, k: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32)


def _on_grid(grid: Grid, n: int, k: int, seed: int = 0) -> QuantizedMatrix:
    """Random codes over their whole range, and random scales."""
    rng = np.random.default_rng(seed)
    groups = (n, grid.num_groups(k))
    return QuantizedMatrix(
        grid=grid,
        codes=rng.integers(grid.low, grid.high + 1, (n, k)).astype(np.int8 if grid.symmetric else np.uint8),
        scale=rng.standard_normal(groups).astype(np.float32 if grid.group is None else np.float16),
        minimum=None if grid.symmetric else rng.standard_normal(groups).astype(np.float16),
    )


@settings(max_examples=25, deadline=None)
@given(sizes)
def test_floats_round_trip(size: tuple[int, int]) -> None:
    n, k = size
    w = _w(n, k)
    data = packing.pack_f32(w)
    assert data.shape == (-(-n // 16), round_up(k, 64), 16)
    np.testing.assert_array_equal(packing.unpack_float(data, n, k), w)
    half = to_bf16(w)
    packed = packing.pack_bf16(half)
    assert packed.shape == (-(-n // 16), round_up(k, 64) // 2, 16, 2)
    np.testing.assert_array_equal(packing.unpack_bf16(packed, n, k), from_bf16(half))
    assert data.sum(dtype=np.float64) == pytest.approx(w.sum(dtype=np.float64), abs=1e-3)  # padding is zero
    assert packed.astype(np.int64).sum() == half.astype(np.int64).sum()
    halves = packing.pack_f16(w)
    assert halves.shape == data.shape
    np.testing.assert_array_equal(packing.unpack_float(halves, n, k), w.astype(np.float16))


@settings(max_examples=60, deadline=None)
@given(sizes, st.sampled_from(GRIDS), st.integers(0, 1000))
def test_integers_round_trip(size: tuple[int, int], grid: Grid, seed: int) -> None:
    n, k = size
    value = _on_grid(grid, n, k, seed)
    format = MatrixFormat.parse(str(grid))
    tensors = format.pack(value)
    again = format.unpack_integers(tensors, size)
    np.testing.assert_array_equal(again.codes, value.codes)
    np.testing.assert_array_equal(again.scale, value.scale)
    if value.minimum is not None:
        np.testing.assert_array_equal(again.minimum, value.minimum)
    np.testing.assert_array_equal(format.unpack(tensors, size), value.dequantize())
    assert tensors[0].nbytes * 8 == round_up(n, 16) * round_up(k, 64) * grid.bits  # not a bit more than it takes


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_padding_decodes_to_zero(grid: Grid) -> None:
    """Rows beyond N; columns beyond K may hold the minimum, as operands are zero there."""
    format = MatrixFormat.parse(str(grid))
    padded = format.unpack(format.pack(_on_grid(grid, 17, 65)), (32, 128))
    assert (padded[17:] == 0).all()
    assert (padded[:17, 65:] == 0).all() or not grid.symmetric


def test_layouts_are_those_of_the_document() -> None:
    w = np.arange(32 * 64, dtype=np.float32).reshape(32, 64)
    assert packing.pack_f32(w)[1, 5, 3] == w[19, 5]
    assert packing.pack_f16(w)[1, 5, 3] == w[19, 5]
    assert from_bf16(packing.pack_bf16(to_bf16(w)))[1, 2, 3, 1] == from_bf16(to_bf16(w[19, 5]))
    codes = (np.random.default_rng(0).integers(0, 256, (32, 64))).astype(np.uint8)
    assert packing.pack_codes(codes, 8, 0)[1, 3, 2, 1] == codes[18, 13]
    data = packing.pack_codes(codes & 15, 4, 0)
    assert data[1, 3, 2, 1] & 15 == codes[18, 25] & 15
    assert data[1, 3, 2, 1] >> 4 == codes[18, 29] & 15
    scale = np.arange(64, dtype=np.float16).reshape(32, 2)
    assert packing.pack_scales(scale)[1, 1, 2] == scale[18, 1]
    assert (packing.pack_scales(scale, -scale)[1, 1, :, 2] == [scale[18, 1], -scale[18, 1]]).all()


@pytest.mark.parametrize(("bits", "planes"), [(8, (8,)), (6, (4, 2)), (5, (4, 1)), (4, (4,)), (3, (2, 1))])
def test_bit_planes_are_those_of_the_document(bits: int, planes: tuple[int, ...]) -> None:
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (32, 128)).astype(np.uint8)
    data = packing.pack_codes(codes, bits, 0)
    assert data.shape == (2, 4 * bits, 16, 4)
    for n, k in ((0, 0), (18, 13), (31, 127), (5, 63), (20, 100)):
        unit, quad, code, first = data[n // 16, k // 32 * bits : (k // 32 + 1) * bits], k % 32 // 4, 0, 0
        for width in planes:
            byte = int(unit[first + quad * width // 8, n % 16, k % 4])
            code |= (byte >> quad * width % 8 & ((1 << width) - 1)) << first
            first += width
        assert code == codes[n, k]


def test_float16_clips_and_rounds() -> None:
    values = np.array([[1e6, -1e6, 1 + 2**-11, 65504, np.nan]], np.float32)
    got = decode_matrix(values, "f16")
    np.testing.assert_array_equal(got, np.array([[65504, -65504, 1, 65504, np.nan]], np.float32))


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


@pytest.mark.parametrize("name", ["f32", "f16", "bf16", *map(str, GRIDS)])
@pytest.mark.parametrize("glu", [False, True])
def test_stored_tensors_are_as_specified(name: str, glu: bool) -> None:
    format = MatrixFormat.parse(name)
    assert str(format) == name
    w = _w(40, 130)  # an odd number of blocks, and of groups of 64
    stored = StoredWeight(name="w", shape=w.shape, format=format, glu=glu)
    tensors = stored.tensors(w)
    sizes = {"F32": 4, "BF16": 2, "F16": 2, "U8": 1}
    assert [(list(t.shape), t.itemsize) for t in tensors] == [(s.shape, sizes[s.dtype]) for s in stored.specs()]
    assert stored.num_bytes() == sum(t.nbytes for t in tensors)
    assert all(t.nbytes % 64 == 0 for t in tensors)
    if not glu:
        np.testing.assert_array_equal(format.unpack(tensors, w.shape), decode_matrix(w, name))


def test_a_quantised_matrix_is_stored_as_it_is() -> None:
    w, format = _w(40, 130), MatrixFormat.parse("int4-g32-asym")
    assert format.grid is not None
    value = round_to_nearest(w, format.grid)
    stored = StoredWeight(name="w", shape=w.shape, format=format, glu=True)
    for mine, theirs in zip(stored.tensors(value), stored.tensors(w), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize(
    "name", ["int4", "int8-g", "int8-gx", "bf16-g32", "i8", "int7-g32", "int8-asym", "w4a16-g32", "w8a8", "f32-asym"]
)
def test_unknown_format_names(name: str) -> None:
    with pytest.raises(UsageError, match="formats are f32, f16, bf16, int8, and int<bits>-g<group size>"):
        MatrixFormat.parse(name)
