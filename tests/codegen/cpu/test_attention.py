"""Rotary, cache writes and attention against float64; the same bits in any phase, batch and chunking."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from llmc.codegen.cpu import kv_layout
from llmc.formats.floats import from_bf16, to_bf16
from llmc.passes import kv_formats

_PACKED_DIMS = {"fp8": 20, "int8": 20, "int4": 80}  # that kernels_under_test.cpp has


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


def _attend(q: Any, keys: Any, values: Any, positions: Any, scale: float, window: int, softcap: float, kept: Any = None) -> Any:
    """q `[T, HQ, D]`, keys and values `[S, HKV, D]` from position 0, all float64.

    `kept` has `(mask [T, S], keys, values)` of what is read in 16 bit instead.
    """
    group = q.shape[1] // keys.shape[1]
    keys, values = np.repeat(keys, group, axis=1), np.repeat(values, group, axis=1)
    scores = np.einsum("thd,shd->ths", q, keys)
    if kept:
        scores = np.where(kept[0][:, None], np.einsum("thd,shd->ths", q, np.repeat(kept[1], group, axis=1)), scores)
    scores *= scale
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    s = np.arange(keys.shape[0])
    visible = s[None] <= positions[:, None]
    if window:
        visible &= s[None] > positions[:, None] - window
    scores = np.where(visible[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    if not kept:
        return np.einsum("ths,shd->thd", weights, values)
    exact = np.einsum("ths,shd->thd", weights * kept[0][:, None], np.repeat(kept[2], group, axis=1))
    return exact + np.einsum("ths,shd->thd", weights * ~kept[0][:, None], values)


def _rounded(x: Any, dtype: str) -> Any:
    return x.astype(np.float64) if dtype == "f32" else from_bf16(to_bf16(x)).astype(np.float64)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(
    ("dim", "rotary_dim", "start"), [(20, 20, 0), (20, 12, 13), (80, 80, 5), (80, 32, 100_000), (256, 256, 31)]
)
def test_rope_append(kernels: Any, new_cache: Any, dtype: str, dim: int, rotary_dim: int, start: int) -> None:
    heads, kv_heads, tokens = 3, 2, 21
    qkv = _qkv(tokens, heads, kv_heads, dim)
    before, positions = qkv.copy(), np.arange(start, start + tokens)
    cache = new_cache(dim=dim, kv_heads=kv_heads, dtype=dtype, lengths=[start + tokens])
    inv_freq = _inv_freq(rotary_dim)
    kernels.rope_append(cache, qkv, heads, [start], [tokens], inv_freq, scaling=1.25, threads=2)
    rotated = _rotate(before[:, : heads + kv_heads], positions, inv_freq, 1.25)
    np.testing.assert_allclose(qkv[:, :heads], rotated[:, :heads], rtol=1e-6, atol=1e-6)
    tolerance = 1e-6 if dtype == "f32" else 1e-2
    for t, position in enumerate(positions):
        keys, values = cache.token(0, position)
        np.testing.assert_allclose(keys, rotated[t, heads:], rtol=tolerance, atol=tolerance)
        np.testing.assert_array_equal(values, _rounded(before[t, heads + kv_heads :], dtype))


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize(("dtype", "dim"), list(_PACKED_DIMS.items()))
def test_packed_tokens_are_those_of_the_reference(kernels: Any, new_cache: Any, dtype: str, dim: int, rotate: bool) -> None:
    heads, kv_heads, tokens, start = 3, 2, 37, 5
    qkv = _qkv(tokens, heads, kv_heads, dim)
    qkv[3, heads + kv_heads :] = 0.0  # a value of zeros
    qkv[4] *= 1e-3
    qkv[5] *= 1e5
    values = qkv[:, heads + kv_heads :].copy()
    rotated = torch.from_numpy(_rotate(qkv[:, : heads + kv_heads], np.arange(start, start + tokens), _inv_freq(dim), 1.0))
    cache = new_cache(dim=dim, kv_heads=kv_heads, dtype=dtype, lengths=[start + tokens])
    kernels.rope_append(cache, qkv, heads, [start], [tokens], _inv_freq(dim), rotate=rotate, threads=2)
    if rotate:
        rotated = kv_formats.hadamard(rotated)
    got = torch.from_numpy(qkv[:, : heads + kv_heads])
    size = rotated.abs().amax((1, 2), keepdim=True)
    torch.testing.assert_close(got / size, rotated / size, rtol=1e-5, atol=1e-5, check_dtype=False)
    for part, want in enumerate((got[:, heads:], torch.from_numpy(values))):
        stored = torch.stack([torch.from_numpy(np.array(cache.token(0, start + t)[part])) for t in range(tokens)])
        torch.testing.assert_close(stored, kv_formats.round_kv(want, dtype), rtol=1e-6, atol=0.0)


def test_head_norms(kernels: Any, new_cache: Any) -> None:
    heads, kv_heads, dim, tokens = 2, 1, 20, 4
    qkv = _qkv(tokens, heads, kv_heads, dim)
    rng = np.random.default_rng(1)
    q_norm, k_norm = np.zeros(32, np.float32), np.zeros(32, np.float32)
    q_norm[:dim], k_norm[:dim] = rng.standard_normal(dim), rng.standard_normal(dim)
    x = qkv[:, : heads + kv_heads].astype(np.float64)
    weights = np.stack([q_norm[:dim], q_norm[:dim], k_norm[:dim]])
    normed = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6) * weights
    cache = new_cache(dim=dim, kv_heads=kv_heads, dtype="f32", lengths=[tokens])
    kernels.rope_append(cache, qkv, heads, [0], [tokens], _inv_freq(dim), q_norm=q_norm, k_norm=k_norm)
    want = _rotate(normed, np.arange(tokens), _inv_freq(dim), 1.0)
    np.testing.assert_allclose(qkv[:, :heads], want[:, :heads], rtol=2e-6, atol=2e-6)
    keys = np.stack([cache.token(0, t)[0] for t in range(tokens)])
    np.testing.assert_allclose(keys, want[:, heads:], rtol=2e-6, atol=2e-6)


_SHAPES = [  # dim, heads, kv_heads, window, softcap, lengths
    (20, 1, 1, 0, 0.0, [1]),
    (20, 4, 4, 0, 0.0, [15, 16, 17]),
    (80, 6, 2, 0, 30.0, [130, 1, 49]),
    (20, 24, 2, 128, 5.0, [129, 257]),
    (80, 2, 2, 1, 0.0, [70]),
]
_LARGE = (256, 4, 1, 40, 0.0, [200, 300])
_CASES = [(dtype, *shape) for dtype in ("f32", "bf16") for shape in (*_SHAPES, _LARGE)]
_CASES += [(dtype, *shape) for dtype, dim in _PACKED_DIMS.items() for shape in _SHAPES[1:] if shape[0] == dim]


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize(("dtype", "dim", "heads", "kv_heads", "window", "softcap", "lengths"), _CASES)
def test_attention(
    kernels: Any,
    new_cache: Any,
    decode: bool,
    dtype: str,
    dim: int,
    heads: int,
    kv_heads: int,
    window: int,
    softcap: float,
    lengths: list[int],
) -> None:
    cache = new_cache(dim=dim, kv_heads=kv_heads, dtype=dtype, lengths=lengths)
    qkv = _qkv(sum(lengths), heads, kv_heads, dim)
    starts = [0] * len(lengths)
    kernels.rope_append(cache, qkv, heads, starts, lengths, _inv_freq(dim))
    options = {"scale": dim**-0.5, "window": window, "softcap": softcap}
    got = kernels.attention(cache, qkv, heads, starts, lengths, decode=decode, threads=2, **options)
    first = 0
    for i, length in enumerate(lengths):
        keys, values = _stored(cache, i, length)
        new = qkv[first : first + length]
        want = _attend(
            _rounded(new[:, :heads], dtype),
            keys,
            values,
            np.arange(length),
            *options.values(),
            kept=_kept(new[:, heads:], length) if kv_formats.is_packed(dtype) else None,
        )
        np.testing.assert_allclose(got[first : first + length], want, rtol=2e-5, atol=1e-5)
        first += length


def _stored(cache: Any, sequence: int, length: int) -> Any:
    """Keys and values `[S, HKV, D]` as the pool has them."""
    tokens = [cache.token(sequence, position) for position in range(length)]
    return [np.stack(part).astype(np.float64) for part in zip(*tokens, strict=True)]


def _kept(kv: Any, length: int, slot_start: int = 0) -> Any:
    """Which of its keys each query reads in 16 bit, and all keys and values in it; `kv [S, 2 * HKV, D]`."""
    at = np.arange(length)
    near = (at[None] // 16 == 0) | (at[:, None] // 16 - at[None] // 16 < 2)
    keys, values = np.split(_rounded(kv, "bf16"), 2, axis=1)
    return near & (at[None] // 16 * 16 >= slot_start), keys, values


@pytest.mark.parametrize("dtype", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("slot_start", [0, 16, 40])
def test_what_a_slot_lacks_is_read_from_the_pool(kernels: Any, new_cache: Any, dtype: str, slot_start: int) -> None:
    """As after a prefix that other sequences computed: another slot, whose content is NaN, and positions before it from the pool."""
    heads, kv_heads, dim, length = 4, 2, _PACKED_DIMS[dtype], 75
    cache = new_cache(dim=dim, kv_heads=kv_heads, dtype=dtype, lengths=[length])
    qkv = _qkv(length, heads, kv_heads, dim)
    shared = np.ascontiguousarray(qkv[:slot_start])
    if slot_start:
        kernels.rope_append(cache, shared, heads, [0], [slot_start], _inv_freq(dim))
        kernels.attention(cache, shared, heads, [0], [slot_start])
    cache.slot_memory.fill(0xFF)
    cache.slot_start[:] = slot_start
    own, got = np.ascontiguousarray(qkv[slot_start:]), []
    for begin, end in ((0, 7), (7, 9), (9, length - slot_start)):
        part = own[begin:end]
        kernels.rope_append(cache, part, heads, [slot_start + begin], [end - begin], _inv_freq(dim))
        got.append(kernels.attention(cache, part, heads, [slot_start + begin], [end - begin]))
    all_new = np.concatenate((shared, own))
    kept = _kept(all_new[:, heads:], length, slot_start)
    keys, values = _stored(cache, 0, length)
    want = _attend(_rounded(all_new[:, :heads], dtype), keys, values, np.arange(length), 0.25, 0, 0.0, kept=kept)
    np.testing.assert_allclose(np.concatenate(got), want[slot_start:], rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["int8"])
def test_a_sequence_may_go_back_a_block(kernels: Any, new_cache: Any, dtype: str) -> None:
    """Sixteen drafts are rejected: computed again from there, every token gets the bits it would have had."""
    heads, dim, length = 2, 20, 100
    inputs = _qkv(length, heads, heads, dim)
    rejected = _qkv(length, heads, heads, dim, seed=9)

    def run(cache: Any, source: Any, start: int, end: int) -> Any:
        part = source[start:end].copy()
        kernels.rope_append(cache, part, heads, [start], [end - start], _inv_freq(dim))
        return kernels.attention(cache, part, heads, [start], [end - start], decode=True)

    def fresh() -> Any:
        return new_cache(dim=dim, kv_heads=heads, dtype=dtype, lengths=[length])

    want = run(fresh(), inputs, 0, length)
    for back in (47, 48, 63, 64):
        cache = fresh()
        run(cache, inputs, 0, back)
        run(cache, rejected, back, back + 16)
        np.testing.assert_array_equal(run(cache, inputs, back, length), want[back:])


@pytest.mark.parametrize(
    ("dtype", "dim", "heads", "kv_heads", "window"),
    [
        *((dtype, *shape) for dtype in ("f32", "bf16") for shape in ((20, 6, 2, 0), (80, 4, 1, 33), (256, 4, 1, 0))),
        ("fp8", 20, 6, 2, 0),
        ("int8", 20, 6, 2, 20),
        ("int4", 80, 4, 1, 33),
    ],
)
def test_bits_do_not_depend_on_phase_batch_chunks_or_threads(
    kernels: Any, new_cache: Any, dtype: str, dim: int, heads: int, kv_heads: int, window: int
) -> None:
    lengths = [150, 37]
    inputs = _qkv(sum(lengths), heads, kv_heads, dim)

    def run(cache: Any, rows: Any, starts: list[int], counts: list[int], decode: bool, threads: int) -> Any:
        qkv = np.ascontiguousarray(inputs[rows])
        kernels.rope_append(cache, qkv, heads, starts, counts, _inv_freq(dim), threads=threads)
        return kernels.attention(cache, qkv, heads, starts, counts, decode=decode, threads=threads, window=window)

    def fresh(seed: int) -> Any:
        return new_cache(dim=dim, kv_heads=kv_heads, dtype=dtype, lengths=lengths, seed=seed)

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
    cache = new_cache(dim=dim, kv_heads=heads, dtype="bf16", lengths=[length] * batch)
    qkv = _qkv(batch * length, heads, heads, dim)
    starts = [0] * batch
    kernels.rope_append(cache, qkv, heads, starts, [length] * batch, _inv_freq(dim), threads=2)
    last = np.ascontiguousarray(qkv[length - 1 :: length])
    starts, counts = [length - 1] * batch, [1] * batch
    got = kernels.attention(cache, last, heads, starts, counts, decode=True, threads=2)
    np.testing.assert_array_equal(got, kernels.attention(cache, last, heads, starts, counts, threads=2))


@pytest.mark.parametrize("packed", [False, True])
def test_workspace_size_is_known_to_the_planner(kernels: Any, packed: bool) -> None:
    for tokens, heads, dim, threads in ((1, 1, 8, 1), (512, 32, 128, 64), (7, 4, 20, 3)):
        planned = kv_layout.attention_workspace_bytes(tokens, heads, dim, packed=packed, threads=threads)
        assert kernels.lib.test_workspace_bytes(tokens, heads, dim, int(packed), threads) == planned
    assert kv_layout.attention_workspace_bytes(64, 32, 128, packed=packed, threads=8) < 16 << 20
