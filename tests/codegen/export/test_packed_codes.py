"""The tensors of compressed-tensors' pack-quantized format, by its definition and back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from llmc.codegen.export.packed_codes import pack_matrix, unpack_matrix
from llmc.formats.grid import Grid, QuantizedMatrix
from llmc.formats.round_to_nearest import round_to_nearest


def test_code_i_of_a_word_lies_in_its_bits_4i_to_4i_plus_3() -> None:
    codes = np.array([[-8, -7, 0, 7, 1, 2, 3, 4, *[-1] * 56]], np.int8)
    value = QuantizedMatrix(grid=Grid(bits=4, group=64), codes=codes, scale=np.ones((1, 1), np.float16))
    tensors = pack_matrix(value)
    word = int(tensors["weight_packed"][0, 0]) & 0xFFFFFFFF
    assert [(word >> 4 * i) & 15 for i in range(8)] == [0, 1, 8, 15, 9, 10, 11, 12]
    assert tensors["weight_packed"].dtype == torch.int32
    assert tensors["weight_packed"].shape == (1, 8)
    assert tensors["weight_shape"].tolist() == [1, 64]


@pytest.mark.parametrize("name", ["int4-g32", "int4-g64", "int8-g32", "int8"])
def test_what_is_packed_comes_back(name: str) -> None:
    """96 columns: a group fewer than the padded grid has."""
    grid = Grid.parse(name)
    assert grid is not None
    k = 96 if name == "int4-g32" else 128
    value = round_to_nearest(np.random.default_rng(0).standard_normal((5, k)).astype(np.float32), grid)
    tensors = pack_matrix(value)
    assert tensors["weight_scale"].shape == (5, k // (grid.group or k))
    np.testing.assert_array_equal(unpack_matrix(tensors, grid.bits, grid.group).numpy(), value.dequantize())


def test_minimums_that_are_whole_steps_become_zero_points() -> None:
    rng = np.random.default_rng(0)
    scale = (2.0 ** rng.integers(-6, 0, (5, 2))).astype(np.float16)
    minimum = (-rng.integers(0, 16, (5, 2)) * scale).astype(np.float16)
    codes = rng.integers(0, 16, (5, 64)).astype(np.uint8)
    value = QuantizedMatrix(grid=Grid(bits=4, group=32, symmetric=False), codes=codes, scale=scale, minimum=minimum)
    tensors = pack_matrix(value)
    assert tensors["weight_zero_point"].shape == (1, 2)  # five rows in one word
    np.testing.assert_array_equal(unpack_matrix(tensors, 4, 32).numpy(), value.dequantize())


def test_other_minimums_are_refused() -> None:
    value = round_to_nearest(
        np.random.default_rng(0).standard_normal((2, 64)).astype(np.float32), Grid(bits=4, group=32, symmetric=False)
    )
    with pytest.raises(ValueError, match="whole multiples"):
        pack_matrix(value)
