"""Linears: every format, path and epilogue against float64, and bitwise independence of batch and threads."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
from llmc.codegen.cpu.formats import MatrixFormat
from llmc.codegen.cpu.packing import Format, operand_row_bytes
from llmc.formats.grid import QuantizedMatrix

FORMATS = get_args(Format)
INTEGERS = FORMATS[3:]
GATED = ("f32", "bf16", "i8", "i8g", "i5a")  # those built with gated epilogues
TOLERANCE = {"f32": 3e-6, "f16": 3e-6, "bf16": 1e-2, **dict.fromkeys(INTEGERS, 1e-4)}
ERF = np.vectorize(__import__("math").erf)


def _relative_error(got: Any, want: Any) -> float:
    return float(np.abs(got - want).max() / np.abs(want).max())


def _x(rows: int, k: int, seed: int = 1) -> Any:
    return np.random.default_rng(seed).standard_normal((rows, k)).astype(np.float32)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    ("rows", "n", "k"),
    [(1, 16, 64), (1, 1, 8), (2, 17, 65), (3, 100, 128), (5, 63, 200), (7, 64, 96), (13, 129, 320), (40, 250, 70)],
)
def test_matches_float64(kernels: Any, matrix: Any, kind: str, rows: int, n: int, k: int) -> None:
    w, x = matrix(kind, n, k), _x(rows, k)
    assert _relative_error(kernels.linear(x, w, threads=2), x @ w.values.T) < TOLERANCE[kind]


@pytest.mark.parametrize("kind", GATED)
@pytest.mark.parametrize("epilogue", ["glu_silu", "glu_gelu_tanh", "glu_gelu"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_gate_up(kernels: Any, matrix: Any, kind: str, epilogue: str, with_bias: bool) -> None:
    rows, n, k = 9, 90, 128
    w, x = matrix(kind, n, k, pair=True), _x(rows, k)
    gate, up = np.split(x.astype(np.float64) @ w.values.T, 2, axis=1)
    packed_bias = None
    if with_bias:
        bias = np.random.default_rng(2).standard_normal((2, n)).astype(np.float32)
        gate, up = gate + bias[0], up + bias[1]
        padded = np.zeros((2, 96), np.float32)
        padded[:, :n] = bias
        packed_bias = np.ascontiguousarray(padded.reshape(2, 6, 16).transpose(1, 0, 2)).reshape(-1)
    activated = {
        "glu_silu": gate / (1 + np.exp(-gate)),
        "glu_gelu_tanh": 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))),
        "glu_gelu": 0.5 * gate * (1 + ERF(gate / np.sqrt(2))),
    }[epilogue]
    got = kernels.linear(x, w, bias=packed_bias, epilogue=epilogue)
    assert _relative_error(got, activated * up) < 2 * TOLERANCE[kind]


def test_bias(kernels: Any, matrix: Any) -> None:
    w, x = matrix("f32", 20, 64), _x(3, 64)
    bias = np.arange(32, dtype=np.float32)
    want = x @ w.values.T + bias[:20]
    assert _relative_error(kernels.linear(x, w, bias=bias), want) < TOLERANCE["f32"]


@pytest.mark.parametrize("kind", INTEGERS[1:])
@pytest.mark.parametrize("group", [64, 128])
def test_groups(kernels: Any, matrix: Any, kind: str, group: int) -> None:
    w, x = matrix(kind, 40, 320, group=group), _x(4, 320)  # with 128, the last group is half as wide
    got = kernels.linear(x, w)
    assert _relative_error(got, x @ w.values.T) < TOLERANCE[kind]
    np.testing.assert_array_equal(got[3], kernels.linear(x[3:], w)[0])
    ids = np.array([39, 0], np.int32)
    np.testing.assert_array_equal(kernels.embedding(ids, w, 1.0), w.values[ids])


@pytest.mark.parametrize("kind", INTEGERS)
@pytest.mark.parametrize("group", [32, 128])
def test_levels_agree_to_the_bit(kernels: Any, matrix: Any, kind: Any, group: int) -> None:
    """Where every sum fits the 24 bits of a float32, a level has nothing to round: all give the exact product."""
    n, k, rows = 49, 320, 5
    rng = np.random.default_rng(group)
    grid = MatrixFormat(kind=kind, group=None if kind == "i8" else group).grid
    assert grid is not None
    codes = rng.integers(grid.low, grid.high + 1, (n, k))
    codes[:, 0] = 1
    powers = 2.0 ** -rng.integers(3, 6, (n, grid.num_groups(k)))
    w = matrix(
        kind,
        n,
        k,
        group=group,
        value=QuantizedMatrix(
            grid=grid,
            codes=codes.astype(np.int8 if grid.symmetric else np.uint8),
            scale=powers.astype(np.float32 if kind == "i8" else np.float16),
            minimum=None if grid.symmetric else (powers * rng.integers(-8, 9, powers.shape)).astype(np.float16),
        ),
    )
    x = rng.integers(-300, 301, (rows, k)).astype(np.float32)
    x[:, 0] = 32512  # the largest magnitude, which makes the step of the 16-bit integers 1
    np.testing.assert_array_equal(kernels.linear(x, w), x.astype(np.float64) @ w.values.T)


@pytest.mark.parametrize("kind", INTEGERS)
def test_groups_of_zeros(kernels: Any, matrix: Any, kind: str) -> None:
    values = _x(20, 130, seed=3)
    values[:, 32:64] = values[7] = 0
    w, x = matrix(kind, 20, 130, value=values), _x(2, 130)
    got = kernels.linear(x, w)
    assert (got[:, 7] == 0).all()
    assert _relative_error(got, x @ w.values.T) < TOLERANCE[kind]
    rows = kernels.embedding(np.array([7, 8], np.int32), w, 1.0)
    assert (rows[0] == 0).all()
    assert (rows[1, 32:64] == 0).all()
    assert (rows[1, 64:] != 0).any()


@pytest.mark.parametrize("kind", FORMATS)
def test_row_does_not_depend_on_batch_or_threads(kernels: Any, matrix: Any, kind: str) -> None:
    w, x = matrix(kind, 333, 192), _x(23, 192)
    batch = kernels.linear(x, w, threads=2)
    np.testing.assert_array_equal(batch, kernels.linear(x, w, threads=1))
    np.testing.assert_array_equal(batch, kernels.linear(x, w, threads=3))
    for row in range(0, 23, 5):
        np.testing.assert_array_equal(batch[row], kernels.linear(x[row : row + 1], w, threads=2)[0])


@pytest.mark.parametrize("kind", INTEGERS)
@pytest.mark.parametrize("group", [32, 128])
def test_integer_extremes(kernels: Any, matrix: Any, kind: str, group: int) -> None:
    """Full-scale rows of one sign, where saturating or wrapping arithmetic would show."""
    k = 2048
    w = matrix(kind, 32, k, group=group)
    x = np.ones((2, k), np.float32)
    x[1] = -1.0
    assert _relative_error(kernels.linear(x, w), x @ w.values.T) < 1e-4
    for byte in (0, 255):  # the lowest code, the highest
        w.data[:] = byte
        values = w.format.unpack([w.data, w.scale], (32, k)).astype(np.float64)
        assert _relative_error(kernels.linear(x, w), x @ values.T) < 1e-4


@pytest.mark.parametrize("kind", FORMATS)
def test_zero_and_tiny_rows(kernels: Any, matrix: Any, kind: str) -> None:
    w = matrix(kind, 20, 100)
    x = np.zeros((3, 100), np.float32)
    x[1] = 1e-38
    x[2] = 1.0
    out = kernels.linear(x, w)
    assert (out[0] == 0).all()
    assert np.abs(out[1]).max() < 1e-35
    assert _relative_error(out[2], w.values.sum(axis=1)) < 10 * TOLERANCE[kind]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
def test_non_finite_input_stays_in_its_row(kernels: Any, matrix: Any, kind: str, value: float) -> None:
    w, x = matrix(kind, 20, 100), _x(3, 100)
    clean = kernels.linear(x, w)
    x[1, 7] = value
    operand = kernels.pack_rows(kind, x)
    out = np.zeros((3, 20), np.float32)
    kernels.lib.test_linear(
        FORMATS.index(kind),
        0,
        operand.ctypes.data_as(_void_p()),
        w.data.ctypes.data_as(_void_p()),
        None if w.scale is None else w.scale.ctypes.data_as(_void_p()),
        w.group,
        None,
        3,
        20,
        100,
        out.ctypes.data_as(_void_p()),
        20,
        1,
    )
    np.testing.assert_array_equal(out[[0, 2]], clean[[0, 2]])


def _void_p() -> Any:
    import ctypes

    return ctypes.c_void_p


@pytest.mark.parametrize("kind", FORMATS)
def test_operand_size_is_known_to_the_planner(kernels: Any, kind: Any) -> None:
    number = FORMATS.index(kind)
    for k in (1, 63, 64, 65, 640, 2048):
        for group in (32, 64, 128):
            size = kernels.lib.test_operand_bytes(number, k, group)
            assert size == operand_row_bytes(kind, k, group)
            assert size % 64 == 0


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("k", [72, 8, 128])
def test_embedding(kernels: Any, matrix: Any, kind: str, k: int) -> None:
    w = matrix(kind, 50, k)
    ids = np.array([0, 49, 17, 17, 3], np.int32)
    want = w.values[ids].astype(np.float32) * np.float32(1.5)
    np.testing.assert_array_equal(kernels.embedding(ids, w, 1.5, threads=2), want)
