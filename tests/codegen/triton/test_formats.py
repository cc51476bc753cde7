"""The GPU layouts of every format, read by hand as the kernels read them."""

from __future__ import annotations

import numpy as np
import pytest
from llmc.codegen.triton.formats import GpuFormat, decode_matrix, pack_vector, row_stride
from llmc.codegen.triton.weight_layout import GpuWeight
from llmc.errors import UsageError
from llmc.formats.floats import from_bf16, from_fp8

FORMATS = ("bf16", "fp8", "fp8-fnuz", "w8a8", "w4a16-g32", "w4a16-g64", "w4a16-g128")


def _w(n: int, k: int) -> np.ndarray:
    values = np.random.default_rng(n * 1000 + k).standard_normal((n, k)).astype(np.float32)
    values[n // 2] *= 1e-6  # rows of very different size
    return values


def test_rows_of_zeros_stay_zero() -> None:
    for format in FORMATS:
        assert (decode_matrix(np.zeros((3, 40), np.float32), format) == 0).all()


@pytest.mark.parametrize(("n", "k"), [(7, 72), (16, 256), (5, 100)])
@pytest.mark.parametrize("text", FORMATS)
def test_layouts_hold_what_decode_says(text: str, n: int, k: int) -> None:
    """The stored tensors, read by hand as the kernels read them, against `decode`."""
    format, w = GpuFormat.parse(text), _w(n, k)
    tensors = format.pack(w)
    for tensor, spec in zip(tensors, format.specs("w", (n, k)), strict=True):
        assert list(tensor.shape) == spec.shape
        assert tensor.nbytes % 64 == 0
    data = tensors[0]
    if format.group:
        groups = data.shape[1] * 2 // format.group
        scale = tensors[1][: groups * n].reshape(groups, n).astype(np.float32)
        values = np.empty((n, groups * format.group), np.float32)
        for column in range(values.shape[1]):
            group, j = divmod(column, format.group)
            byte = data[:n, group // 2 * format.group + j]
            values[:, column] = ((byte >> 4 if group % 2 else byte & 15).astype(np.float32) - 8) * scale[group]
        assert (values[:, k:] == 0).all()
    else:
        assert data.shape[1] == row_stride(k)
        read = {
            "bf16": from_bf16,
            "w8a8": lambda q: q.astype(np.float32),
            "fp8": lambda b: from_fp8(b, fnuz=False),
            "fp8-fnuz": lambda b: from_fp8(b, fnuz=True),
        }[text]
        values = read(data)[:n]
        assert (data[:, k:] == 0).all()
        if len(tensors) > 1:
            values = values * tensors[1][:n, None]
    np.testing.assert_array_equal(values[:, :k], format.decode(w))
    error = np.abs(format.decode(w) - w).max(1) / np.abs(w).max(1)
    assert error.max() < {"bf16": 0.004, "w8a8": 0.004}.get(text, 0.04 if "fp8" in text else 0.21)


def test_vectors_get_their_offset_and_padding() -> None:
    value = np.arange(20, dtype=np.float32)
    weight = GpuWeight(name="norm", shape=(20,), offset=1.0)
    (tensor,) = weight.tensors(value)
    assert [list(tensor.shape)] == [spec.shape for spec in weight.specs()] == [[32]]
    np.testing.assert_array_equal(tensor[:20], value + 1)
    assert (pack_vector(value)[20:] == 0).all()


def test_equal_weights_are_shared_and_others_are_not() -> None:
    def make(format: str) -> GpuWeight:
        return GpuWeight(name="w", shape=(4, 64), format=GpuFormat.parse(format))

    assert len({make("fp8"), make("fp8"), make("fp8-fnuz"), make("bf16")}) == 3


@pytest.mark.parametrize("name", ["int8", "w4a16", "w4a16-gx", "fp8-g32", ""])
def test_unknown_formats(name: str) -> None:
    with pytest.raises(UsageError, match="is unknown on GPUs; formats are"):
        GpuFormat.parse(name)
