"""RMS norm and its fusions against float64; a fused operand equals the plain one packed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest


def _values(rows: int, width: int, seed: int) -> Any:
    return np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)


def _rms_norm(x: Any, weight: Any, eps: float) -> Any:
    x = x.astype(np.float64)
    return x / np.sqrt((x**2).mean(axis=1, keepdims=True) + eps) * weight.astype(np.float64)


@pytest.mark.parametrize(("rows", "width"), [(1, 8), (3, 16), (9, 37), (2, 640), (1, 4100)])
def test_rms_norm(kernels: Any, rows: int, width: int) -> None:
    x, weight = _values(rows, width, 1), _values(1, width, 2)[0]
    got = kernels.rms_norm(x, weight, 1e-6, threads=2)
    np.testing.assert_allclose(got, _rms_norm(x, weight, 1e-6), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("has_post", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("width", [24, 100, 640])
def test_residual_norm(kernels: Any, has_post: bool, has_residual: bool, width: int) -> None:
    x, weight, post = _values(6, width, 1), _values(1, width, 2)[0], _values(1, width, 3)[0]
    residual = _values(6, width, 4)
    before_x, before = x.copy(), residual.copy()
    got = kernels.residual_norm(
        x, weight, post=post if has_post else None, residual=residual if has_residual else None, threads=2
    )
    y = _rms_norm(x, post, 1e-5) if has_post else x.astype(np.float64)
    if has_residual:
        y = before + y
        np.testing.assert_allclose(residual, y, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(got, _rms_norm(y, weight, 1e-6), rtol=5e-6, atol=5e-6)
    np.testing.assert_array_equal(x, before_x)


@pytest.mark.parametrize("kind", ["f32", "bf16", "i8", "i8g"])
@pytest.mark.parametrize("width", [72, 640])
def test_operand_is_what_packing_the_floats_gives(kernels: Any, kind: str, width: int) -> None:
    x, weight, residual = _values(5, width, 1), _values(1, width, 2)[0], _values(5, width, 3)
    floats = kernels.residual_norm(x, weight, residual=residual.copy())
    operand = kernels.residual_norm(x, weight, residual=residual.copy(), kind=kind, threads=2)
    used = _used_bytes(kind, width)
    stride = operand.size // 5
    want = kernels.pack_rows(kind, np.ascontiguousarray(floats))
    for row in range(5):
        span = slice(row * stride, row * stride + used)
        np.testing.assert_array_equal(operand[span], want[span])


def _used_bytes(kind: str, width: int) -> int:
    padded = -(-width // 64) * 64
    grouped = 2 * padded + 4 + padded // 4  # in groups of 32
    return {"f32": 4 * padded, "bf16": 2 * padded, "i8": 2 * padded + 12, "i8g": grouped}[kind]
