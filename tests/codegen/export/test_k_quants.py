"""Q4_K, Q5_K and Q6_K blocks as the gguf package decodes them, and their error beside llama.cpp's own quantiser."""

from __future__ import annotations

import ctypes

import gguf
import numpy as np
import pytest
import torch
from llmc.codegen.export.k_quants import K_QUANTS, quantize_k

_STEPS = {"Q4_K": 15, "Q5_K": 31, "Q6_K": 62}  # in the range of a block


def _decode(blocks: np.ndarray, type_name: str) -> np.ndarray:
    return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[type_name])


def _weights(seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_t(5, (64, 512)) * np.exp(rng.normal(0, 0.5, (64, 1))) * 0.02).astype(np.float32)


def _llama_cpp(w: np.ndarray, type_name: str, importance: np.ndarray | None) -> np.ndarray:
    pytest.importorskip("llama_cpp")
    from llama_cpp import _ggml

    quantize = _ggml.libggml.ggml_quantize_chunk  # what llama_model_quantize calls for every tensor
    quantize.restype = ctypes.c_size_t
    quantize.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    kind = gguf.GGMLQuantizationType[type_name]
    columns, size = gguf.GGML_QUANT_SIZES[kind]
    out = np.empty((w.shape[0], w.shape[1] // columns * size), np.uint8)
    pointer = None if importance is None else importance.ctypes.data
    quantize(int(kind), w.ctypes.data, out.ctypes.data, 0, *w.shape, pointer)
    return out


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("type_name", K_QUANTS)
def test_the_error_is_no_worse_than_llama_cpps(type_name: str, weighted: bool) -> None:
    w = _weights()
    importance = np.random.default_rng(1).gamma(0.5, size=w.shape[1]).astype(np.float32) + 1e-3 if weighted else None
    ours = quantize_k(w, type_name, None if importance is None else torch.from_numpy(importance))
    theirs = _llama_cpp(w, type_name, importance)
    h = 1.0 if importance is None else importance
    errors = [float(((_decode(blocks, type_name) - w) ** 2 * h).mean()) for blocks in (ours, theirs)]
    assert errors[0] <= errors[1] * 1.03


@pytest.mark.parametrize("type_name", K_QUANTS)
def test_every_weight_is_within_a_step(type_name: str) -> None:
    w = np.random.default_rng(2).uniform(-1, 1, (4, 768)).astype(np.float32)
    decoded = _decode(quantize_k(w, type_name), type_name)
    assert decoded.shape == w.shape
    assert np.abs(decoded - w).max() < 2 / _STEPS[type_name]


@pytest.mark.parametrize("type_name", K_QUANTS)
def test_importance_moves_the_error_away_from_what_matters(type_name: str) -> None:
    w = _weights(3)
    importance = torch.full((w.shape[1],), 1e-3)
    importance[::8] = 1.0
    plain, weighted = (((_decode(quantize_k(w, type_name, h), type_name) - w) ** 2)[:, ::8].mean() for h in (None, importance))
    assert weighted < 0.95 * plain


@pytest.mark.parametrize("value", [0.0, 1.0, -3.5, 1e-9, 6e4])
@pytest.mark.parametrize("type_name", K_QUANTS)
def test_constant_blocks(type_name: str, value: float) -> None:
    w = np.full((1, 256), value, np.float32)
    decoded = _decode(quantize_k(w, type_name), type_name)
    np.testing.assert_allclose(decoded, w, rtol=0.02, atol=1e-7)


def test_blocks_do_not_depend_on_their_neighbours() -> None:
    w = _weights(4)
    whole = quantize_k(w, "Q4_K")
    np.testing.assert_array_equal(whole[7:9], quantize_k(w[7:9], "Q4_K"))
