"""Codes come back from words, whatever their number and bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from llmc.compiler.checkpoint.quantized.packing import unpack, unpack_words


@given(bits=st.integers(1, 8), shape=st.tuples(st.integers(1, 4), st.integers(1, 70)), spare=st.integers(0, 2), data=st.data())
def test_dense(bits: int, shape: tuple[int, int], spare: int, data: Any, quantized: Any) -> None:
    codes = np.random.default_rng(data.draw(st.integers(0, 99))).integers(0, 1 << bits, shape, dtype=np.uint8)
    words = torch.nn.functional.pad(quantized.pack_words(codes, bits), (0, spare), value=-1)
    assert np.array_equal(unpack(words.numpy(), bits, shape[1]), codes)


@given(bits=st.integers(1, 8), shape=st.tuples(st.integers(1, 4), st.integers(1, 70)), seed=st.integers(0, 99))
def test_whole_codes_in_each_word(bits: int, shape: tuple[int, int], seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 1 << bits, shape, dtype=np.uint8)
    each = 32 // bits
    words = np.full((shape[0], -(-shape[1] // each)), np.uint32(0), np.uint32)
    for column in range(shape[1]):
        words[:, column // each] |= codes[:, column].astype(np.uint32) << np.uint32(column % each * bits)
    assert np.array_equal(unpack_words(words.view(np.int32), bits, shape[1]), codes)
