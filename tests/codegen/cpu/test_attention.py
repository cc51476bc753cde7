"""Rotary, cache writes and attention against float64; the same bits in any phase, batch and chunking."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from llmc.codegen import quantizers
from llmc.codegen.cpu import packing


def _inv_freq(rotary_dim: int) -> Any:
    return (10000.0 ** (-np.arange(0, rotary_dim, 2) / rotary_dim)).astype(np.float32)


def _qkv(tokens: int, heads: int, kv_heads: int, dim: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal((tokens, heads + 2 * kv_heads, dim)).astype(np.float32)


def _rotate(x: Any, positions: Any, inv_freq: Any, scaling: float) -> Any:
    """`[T, H, D]` in float64; angles in float32, as HF computes them."""
    x = x.astype(np.float64)
    half = len(inv_freq)
    angles = (positions.astype(np.float32)[:, None] * inv_freq).astype(np.float64)[:, None]
    cos, sin = np.cos(angles) * scaling, np.sin(angles) * scaling
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate((first * cos - second * sin, second * cos + first * sin, rest), axis=-1)


def _attend(q: Any, keys: Any, values: Any, positions: Any, scale: float, window: int, softcap: float) -> Any:
    """q `[T, HQ, D]`, keys and values `[S, HKV, D]` from position 0, all float64."""
    group = q.shape[1] // keys.shape[1]
    keys, values = np.repeat(keys, group, axis=1), np.repeat(values, group, axis=1)
    scores = np.einsum("thd,shd->ths", q, keys) * scale
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    s = np.arange(keys.shape[0])
    visible = s[None] <= positions[:, None]
    if window:
        visible &= s[None] > positions[:, None] - window
    scores = np.where(visible[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("ths,shd->thd", weights / weights.sum(axis=-1, keepdims=True), values)


def _rounded(x: Any, bf16: bool) -> Any:
    return quantizers.from_bf16(quantizers.to_bf16(x)).astype(np.float64) if bf16 else x.astype(np.float64)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(
    ("dim", "rotary_dim", "start"), [(20, 20, 0), (20, 12, 13), (80, 80, 5), (80, 32, 100_000), (256, 256, 31)]
)
def test_rope_append(kernels: Any, new_cache: Any, bf16: bool, dim: int, rotary_dim: int, start: int) -> None:
    heads, kv_heads, tokens = 3, 2, 21
    qkv = _qkv(tokens, heads, kv_heads, dim)
    before, positions = qkv.copy(), np.arange(start, start + tokens)
    cache = new_cache(dim=dim, kv_heads=kv_heads, bf16=bf16, lengths=[start + tokens])
    inv_freq = _inv_freq(rotary_dim)
    kernels.rope_append(cache, qkv, heads, [start], [tokens], inv_freq, scaling=1.25, threads=2)
    rotated = _rotate(before[:, : heads + kv_heads], positions, inv_freq, 1.25)
    np.testing.assert_allclose(qkv[:, :heads], rotated[:, :heads], rtol=1e-6, atol=1e-6)
    tolerance = 1e-2 if bf16 else 1e-6
    for t, position in enumerate(positions):
        keys, values = cache.token(0, position)
        np.testing.assert_allclose(keys, rotated[t, heads:], rtol=tolerance, atol=tolerance)
        np.testing.assert_array_equal(values, _rounded(before[t, heads + kv_heads :], bf16))


def test_head_norms(kernels: Any, new_cache: Any) -> None:
    heads, kv_heads, dim, tokens = 2, 1, 20, 4
    qkv = _qkv(tokens, heads, kv_heads, dim)
    rng = np.random.default_rng(1)
    q_norm, k_norm = np.zeros(32, np.float32), np.zeros(32, np.float32)
    q_norm[:dim], k_norm[:dim] = rng.standard_normal(dim), rng.standard_normal(dim)
    x = qkv[:, : heads + kv_heads].astype(np.float64)
    weights = np.stack([q_norm[:dim], q_norm[:dim], k_norm[:dim]])
    normed = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6) * weights
    cache = new_cache(dim=dim, kv_heads=kv_heads, bf16=False, lengths=[tokens])
    kernels.rope_append(cache, qkv, heads, [0], [tokens], _inv_freq(dim), q_norm=q_norm, k_norm=k_norm)
    want = _rotate(normed, np.arange(tokens), _inv_freq(dim), 1.0)
    np.testing.assert_allclose(qkv[:, :heads], want[:, :heads], rtol=2e-6, atol=2e-6)
    keys = np.stack([cache.token(0, t)[0] for t in range(tokens)])
    np.testing.assert_allclose(keys, want[:, heads:], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(
    ("dim", "heads", "kv_heads", "window", "softcap", "lengths"),
    [
        (20, 1, 1, 0, 0.0, [1]),
        (20, 4, 4, 0, 0.0, [15, 16, 17]),
        (80, 6, 2, 0, 30.0, [130, 1, 49]),
        (256, 4, 1, 40, 0.0, [200, 300]),
        (20, 24, 2, 128, 5.0, [129, 257]),
        (80, 2, 2, 1, 0.0, [70]),
    ],
)
def test_attention(
    kernels: Any,
    new_cache: Any,
    decode: bool,
    bf16: bool,
    dim: int,
    heads: int,
    kv_heads: int,
    window: int,
    softcap: float,
    lengths: list[int],
) -> None:
    cache = new_cache(dim=dim, kv_heads=kv_heads, bf16=bf16, lengths=lengths)
    qkv = _qkv(sum(lengths), heads, kv_heads, dim)
    starts = [0] * len(lengths)
    kernels.rope_append(cache, qkv, heads, starts, lengths, _inv_freq(dim))
    options = {"scale": dim**-0.5, "window": window, "softcap": softcap}
    got = kernels.attention(cache, qkv, heads, starts, lengths, decode=decode, threads=2, **options)
    first = 0
    for i, length in enumerate(lengths):
        tokens = [cache.token(i, position) for position in range(length)]
        keys, values = (np.stack(part).astype(np.float64) for part in zip(*tokens, strict=True))
        q = _rounded(qkv[first : first + length, :heads], bf16)
        want = _attend(q, keys, values, np.arange(length), *options.values())
        np.testing.assert_allclose(got[first : first + length], want, rtol=2e-5, atol=1e-5)
        first += length


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(("dim", "heads", "kv_heads", "window"), [(20, 6, 2, 0), (80, 4, 1, 33), (256, 4, 1, 0)])
def test_bits_do_not_depend_on_phase_batch_chunks_or_threads(
    kernels: Any, new_cache: Any, bf16: bool, dim: int, heads: int, kv_heads: int, window: int
) -> None:
    lengths = [150, 37]
    inputs = _qkv(sum(lengths), heads, kv_heads, dim)

    def run(cache: Any, rows: Any, starts: list[int], counts: list[int], decode: bool, threads: int) -> Any:
        qkv = np.ascontiguousarray(inputs[rows])
        kernels.rope_append(cache, qkv, heads, starts, counts, _inv_freq(dim), threads=threads)
        return kernels.attention(cache, qkv, heads, starts, counts, decode=decode, threads=threads, window=window)

    def fresh(seed: int) -> Any:
        return new_cache(dim=dim, kv_heads=kv_heads, bf16=bf16, lengths=lengths, seed=seed)

    want = run(fresh(0), np.arange(187), [0, 0], lengths, False, 2)
    for decode, threads in ((False, 1), (False, 3), (True, 2)):
        np.testing.assert_array_equal(run(fresh(1), np.arange(187), [0, 0], lengths, decode, threads), want)

    cache = fresh(2)  # in chunks of uneven size, then token by token, sequences side by side
    for begin, end in ((0, 1), (1, 18), (18, 30)):
        rows = np.concatenate((np.arange(begin, end), 150 + np.arange(begin, end)))
        got = run(cache, rows, [begin, begin], [end - begin] * 2, False, 2)
        np.testing.assert_array_equal(got, want[rows])
    for position in range(30, 37):
        rows = np.array([position, 150 + position])
        np.testing.assert_array_equal(run(cache, rows, [position] * 2, [1, 1], True, 2), want[rows])
    cache_alone = fresh(3)
    cache_alone.table = np.ascontiguousarray(cache_alone.table[:1])
    got = run(cache_alone, np.arange(100), [0], [100], False, 2)
    np.testing.assert_array_equal(got, want[:100])
    for position in range(100, 150, 7):
        rows = np.arange(position, min(position + 7, 150))
        got = run(cache_alone, rows, [position], [len(rows)], True, 2)
        np.testing.assert_array_equal(got, want[rows])


def test_decode_in_several_waves(kernels: Any, new_cache: Any) -> None:
    """More (tile, chunk) pairs than the workspace has slots."""
    heads, dim, batch, length = 2, 20, 24, 800
    cache = new_cache(dim=dim, kv_heads=heads, bf16=True, lengths=[length] * batch)
    qkv = _qkv(batch * length, heads, heads, dim)
    starts = [0] * batch
    kernels.rope_append(cache, qkv, heads, starts, [length] * batch, _inv_freq(dim), threads=2)
    last = np.ascontiguousarray(qkv[length - 1 :: length])
    starts, counts = [length - 1] * batch, [1] * batch
    got = kernels.attention(cache, last, heads, starts, counts, decode=True, threads=2)
    np.testing.assert_array_equal(got, kernels.attention(cache, last, heads, starts, counts, threads=2))


def test_workspace_size_is_known_to_the_planner(kernels: Any) -> None:
    for shape in ((1, 1, 1, 8, 64, 1), (512, 32, 8, 128, 1 << 17, 64), (7, 4, 1, 20, 100, 3)):
        assert kernels.lib.test_workspace_bytes(*shape) == packing.attention_workspace_bytes(*shape)
    small = packing.attention_workspace_bytes(64, 32, 8, 128, 1 << 20, 8)
    assert small < 16 << 20
