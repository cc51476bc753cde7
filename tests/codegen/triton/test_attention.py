"""Prefill and decode attention over the paged pool against a float64 reference of the same stored keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from llmc.codegen.triton.attention import (
    AttentionProblem,
    DecodeTile,
    PrefillTile,
    choose_decode_tile,
    choose_prefill_tile,
    decode_kernel,
    layer_bytes,
    prefill_kernel,
    workspace_bytes,
)
from llmc.errors import TargetError

LAYERS = 3
LAYER = 1  # the one that is attended to
SENTINEL = 0x7FC1  # a bf16 NaN that no kernel writes
TILE = PrefillTile(block_m=16, block_n=32, num_warps=4, num_stages=1)
ROUNDED = 2.0**-8  # largest relative error of a bf16


def problem(heads: int, kv_heads: int, head_dim: int, kv_format: str = "bf16", **settings: Any) -> AttentionProblem:
    size = layer_bytes(kv_heads, head_dim, kv_format)
    return AttentionProblem(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        kv_format=kv_format,
        bytes_per_block=LAYERS * size,
        **{"scale": 1.7 * head_dim**-0.5} | settings,
    )


def to_bf16(x: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def from_bf16(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def from_fp8(code: np.ndarray, fp8_type: str) -> np.ndarray:
    """E4M3 without its NaNs: bias 7, or 8 for FNUZ."""
    exponent, mantissa = (code >> 3 & 15).astype(int), (code & 7) / 8
    bias = 7 if fp8_type == "fp8e4nv" else 8
    value = np.where(exponent > 0, (1 + mantissa) * 2.0 ** (exponent - bias), mantissa * 2.0 ** (1 - bias))
    return np.where(code & 128, -value, value)


@dataclass
class Batch:
    """A step of sequences `(context_len, new tokens)` and a pool that holds nothing but their contexts."""

    settings: AttentionProblem
    sequences: Sequence[tuple[int, int]]
    seed: int = 0

    def __post_init__(self) -> None:
        s, random = self.settings, np.random.default_rng(self.seed)
        self.context_len = np.array([length for length, _ in self.sequences], np.int32)
        self.query_start = np.cumsum([0] + [new for _, new in self.sequences], dtype=np.int32)
        needed = -(-self.context_len // 16)
        self.max_blocks = int(needed.max(initial=0)) + 2
        self.table = np.full((len(self.sequences), self.max_blocks), -1, np.int32)
        blocks = 1 + random.permutation(int(needed.sum()) + 3).astype(np.int32)  # masked loads may not read block 0
        self.pool = np.full((len(blocks) + 1, s.bytes_per_block), 0xFF, np.uint8)
        self.contexts = []
        for row, count, length in zip(self.table, needed, self.context_len, strict=True):
            row[:count], blocks = blocks[:count], blocks[count:]
            self.contexts.append(self._fill(row, int(length), random))
        self.num_tokens = int(self.query_start[-1])
        self.q = to_bf16(random.standard_normal((self.num_tokens, s.num_heads * s.head_dim)))

    def _fill(self, blocks: np.ndarray, length: int, random: np.random.Generator) -> np.ndarray:
        """Random keys and values for one context; returns what they stand for, `[2, Hkv, length, D]`."""
        s, values = self.settings, []
        size, quantised = layer_bytes(s.num_kv_heads, s.head_dim, s.kv_format), s.kv_format != "bf16"
        items = 2 * s.num_kv_heads * 16 * s.head_dim
        for position in range(length):
            layer = self.pool[blocks[position // 16], LAYER * size :]
            stored = layer[: items * (1 if quantised else 2)].view(np.uint8 if quantised else np.uint16)
            slots = stored.reshape(2, s.num_kv_heads, 16, s.head_dim)[:, :, position % 16]
            value = random.standard_normal(slots.shape)
            if s.kv_format == "bf16":
                slots[...] = to_bf16(value)
                values.append(from_bf16(slots))
                continue
            scales = layer[items : items + 2 * s.num_kv_heads * 64].view(np.float32).reshape(2, s.num_kv_heads, 16)
            scales[..., position % 16] = random.uniform(0.5, 1.5, scales.shape[:2]) / (64 if s.kv_format == "int8" else 8)
            if s.kv_format == "int8":
                slots[...] = np.clip(np.rint(value * 50), -127, 127).astype(np.int8).view(np.uint8)
                decoded = slots.view(np.int8).astype(np.float64)
            else:
                slots[...] = random.integers(0, 0x58, slots.shape) | random.integers(0, 2, slots.shape) << 7
                slots[slots == 0x80] = 0  # NaN in FNUZ
                decoded = from_fp8(slots, s.fp8_type)
            values.append(decoded * scales[..., position % 16, None].astype(np.float64))
        return np.array(values).reshape(length, 2, s.num_kv_heads, s.head_dim).transpose(1, 2, 0, 3)

    def reference(self) -> np.ndarray:
        s = self.settings
        q = from_bf16(self.q).reshape(self.num_tokens, s.num_kv_heads, s.group, s.head_dim)
        out = np.zeros(q.shape)
        for (length, new), start, (keys, values) in zip(self.sequences, self.query_start, self.contexts, strict=False):
            if not length:
                continue
            scores = np.einsum("qhgd,hkd->hgqk", q[start : start + new], keys) * s.scale
            if s.softcap:
                scores = np.tanh(scores / s.softcap) * s.softcap
            query, key = np.arange(length - new, length)[:, None], np.arange(length)
            hidden = (key > query) | ((key <= query - s.window) if s.window else False)
            scores = np.where(hidden, -np.inf, scores)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            out[start : start + new] = np.einsum("hgqk,hkd->qhgd", weights, values)
        return out.reshape(self.num_tokens, -1)

    def pools(self) -> dict[str, np.ndarray]:
        return {"kv_pool": self.pool} | ({"kv_scales": self.pool} if self.settings.kv_format != "bf16" else {})

    def last(self) -> dict[str, int]:
        s = self.settings
        offset = LAYER * layer_bytes(s.num_kv_heads, s.head_dim, s.kv_format)
        return {"num_seqs": len(self.sequences), "max_blocks": self.max_blocks, "layer_offset": offset}

    def empty_out(self) -> np.ndarray:
        width = self.settings.num_heads * self.settings.head_dim
        return np.full((self.num_tokens + 1, -(-width // 16) * 16), SENTINEL, np.uint16)

    def check(self, out: np.ndarray, pool_before: np.ndarray) -> None:
        width = self.settings.num_heads * self.settings.head_dim
        reference = self.reference()
        error = np.abs(from_bf16(out[: self.num_tokens, :width]) - reference).max() / np.abs(reference).max()
        assert error < ROUNDED + 1e-4  # NaN fails too
        assert (out[self.num_tokens :] == SENTINEL).all()
        assert (out[:, width:] == SENTINEL).all()
        assert (self.pool == pool_before).all()


def prefill(launch: Callable[..., None], batch: Batch, tile: PrefillTile = TILE) -> None:
    before, out = batch.pool.copy(), batch.empty_out()
    arguments = {"q": batch.q, **batch.pools(), "query_start": batch.query_start, "context_len": batch.context_len}
    arguments |= {"block_table": batch.table, "out": out, "num_tokens": batch.num_tokens, **batch.last()}
    launch(prefill_kernel(batch.settings, tile), arguments, T=batch.num_tokens, R=1, B=len(batch.sequences))
    batch.check(out, before)


def decode(launch: Callable[..., None], batch: Batch, tile: DecodeTile, launches: int = 1) -> np.ndarray:
    before, out = batch.pool.copy(), batch.empty_out()
    partial_bytes, counter_bytes = workspace_bytes(batch.settings, tile, len(batch.sequences))
    partials, counters = np.full(partial_bytes // 4 + 4, np.nan, np.float32), np.zeros(counter_bytes // 4 + 1, np.int32)
    counters[-1] = 77
    arguments = {"q": batch.q, **batch.pools(), "context_len": batch.context_len, "block_table": batch.table, "out": out}
    if tile.num_splits > 1:
        arguments |= {"partials": partials, "counters": counters}
    arguments |= batch.last()
    results = []
    for _ in range(launches):
        out[...] = SENTINEL
        launch(decode_kernel(batch.settings, tile), arguments, T=batch.num_tokens, R=1, B=len(batch.sequences))
        batch.check(out, before)
        results.append(out.copy())
    assert all((result == out).all() for result in results)
    assert (counters[:-1] == 0).all()
    assert counters[-1] == 77
    assert np.isnan(partials[-4:]).all()
    return out


MIXED = [(5, 5), (1, 1), (33, 7), (0, 1), (16, 16), (48, 1), (17, 3)]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "kv_format", "settings"),
    [
        (2, 2, 64, "bf16", {}),
        (4, 1, 128, "bf16", {"window": 9}),
        (7, 1, 80, "bf16", {"softcap": 3.0}),
        (8, 1, 96, "int8", {"window": 20, "softcap": 5.0}),
        (4, 1, 256, "fp8", {}),
        (4, 2, 20, "int8", {"window": 16}),
        (6, 2, 24, "fp8", {"softcap": 2.0, "fp8_type": "fp8e4b8"}),
    ],
)
def test_prefill_of_a_mixed_batch(launch, heads, kv_heads, head_dim, kv_format, settings):
    prefill(launch, Batch(problem(heads, kv_heads, head_dim, kv_format, **settings), MIXED))


@pytest.mark.parametrize("kv_format", ["fp8", "int8"])
def test_prefill_converts_stored_items_in_one_place(launch, kv_format):
    prefill(launch, Batch(problem(4, 2, 20, kv_format, window=18), MIXED), replace(TILE, convert_once=True))


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 63, 65])
def test_prefill_of_whole_prompts_at_page_boundaries(launch, length):
    prefill(launch, Batch(problem(2, 1, 16), [(length, length)], seed=length))


@pytest.mark.parametrize(("length", "new"), [(100, 1), (100, 16), (97, 33), (64, 32), (130, 2)])
@pytest.mark.parametrize("window", [0, 1, 15, 40])
def test_prefill_of_chunks(launch, length, new, window):
    tile = replace(TILE, block_m=32, block_n=16)
    prefill(launch, Batch(problem(2, 1, 32, window=window), [(length, new)], seed=length), tile)


def test_prefill_finds_its_sequence_among_hundreds(launch):
    sequences = [(0, 0)] * 255 + [(3, 1), (0, 0), (5, 2), (2, 2)]
    prefill(launch, Batch(problem(2, 1, 16), sequences), replace(TILE, block_m=64))


CONTEXTS = [(1, 1), (15, 1), (16, 1), (17, 1), (32, 1), (0, 1), (70, 1), (129, 1)]


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "kv_format", "settings"),
    [
        (2, 2, 64, "bf16", {}),
        (4, 1, 128, "bf16", {"window": 40}),
        (7, 1, 80, "bf16", {"softcap": 3.0}),
        (8, 1, 96, "int8", {"window": 20, "softcap": 5.0}),
        (4, 1, 256, "fp8", {}),
        (20, 1, 16, "bf16", {}),
        (4, 2, 20, "int8", {"window": 16}),
        (3, 1, 24, "fp8", {"softcap": 2.0, "fp8_type": "fp8e4b8"}),
    ],
)
def test_decode(launch, heads, kv_heads, head_dim, kv_format, settings, num_splits):
    tile = DecodeTile(block_n=16, num_splits=num_splits, num_warps=4, num_stages=1)
    decode(launch, Batch(problem(heads, kv_heads, head_dim, kv_format, **settings), CONTEXTS), tile)


@pytest.mark.parametrize("min_tiles", [1, 2, 100])
def test_decode_splits_agree_and_leave_their_counters_at_zero(launch, min_tiles):
    batch = Batch(problem(4, 2, 32), CONTEXTS, seed=5)
    one = DecodeTile(block_n=16, num_splits=1, num_warps=4, num_stages=1)
    whole = from_bf16(decode(launch, batch, one))
    for num_splits in (2, 7):
        tile = replace(one, num_splits=num_splits, min_tiles=min_tiles)
        parts = from_bf16(decode(launch, batch, tile, launches=2))
        np.testing.assert_allclose(parts[:-1], whole[:-1], rtol=ROUNDED, atol=1e-6)


def test_a_layer_takes_a_multiple_of_64_bytes():
    assert layer_bytes(8, 128, "bf16") == 2 * 8 * 16 * 128 * 2
    assert layer_bytes(8, 128, "fp8") == layer_bytes(8, 128, "int8") == 2 * 8 * 16 * (128 + 4)
    assert layer_bytes(1, 1, "int8") == 192  # 160 bytes, rounded up


def test_names_tell_settings_apart():
    base = problem(8, 2, 64, "fp8")
    others = [
        {"num_heads": 16}, {"num_kv_heads": 4}, {"head_dim": 80}, {"scale": 0.5}, {"window": 8}, {"softcap": 0.25}, {"kv_format": "int8"},
        {"fp8_type": "fp8e4b8"}, {"bytes_per_block": 64},
    ]  # fmt: skip
    problems = [base, *(replace(base, **other) for other in others)]
    tile = DecodeTile(block_n=16, num_splits=2, num_warps=4, num_stages=1)
    tiles = [
        tile,
        *(replace(tile, **{field: 8}) for field in ("block_n", "num_splits", "min_tiles", "num_warps", "num_stages")),
    ]
    names = [prefill_kernel(p, TILE).name for p in problems] + [decode_kernel(p, tile).name for p in problems]
    names += [decode_kernel(base, other).name for other in tiles[1:]]
    names += [
        prefill_kernel(base, replace(TILE, **{field: 64})).name for field in ("block_m", "block_n", "num_warps", "num_stages")
    ]
    names.append(prefill_kernel(base, replace(TILE, convert_once=True)).name)
    assert len(set(names)) == len(names)
    assert all(name.isidentifier() for name in names)


@pytest.mark.parametrize(("field", "value"), [("num_kv_heads", 3), ("bytes_per_block", 100), ("scale", 0.0)])
def test_impossible_problems_are_refused(field, value):
    with pytest.raises(TargetError, match="attention: "):
        replace(problem(8, 2, 64), **{field: value})


def test_tiles_are_refused_for_what_no_kernel_serves():
    with pytest.raises(TargetError, match="sm_80"):
        choose_prefill_tile(problem(8, 2, 64, "fp8"), "sm_80")
    with pytest.raises(TargetError, match="head_dim=512"):
        choose_decode_tile(problem(8, 2, 512), "sm_90", num_processors=132, max_seqs=1)
    with pytest.raises(TargetError, match="gfx942, sm_100"):
        choose_prefill_tile(problem(8, 2, 64), "sm_70")


def test_decode_splits_fill_the_device():
    full = problem(32, 8, 128)
    assert choose_decode_tile(full, "sm_90", num_processors=132, max_seqs=256).num_splits == 1
    assert choose_decode_tile(full, "sm_90", num_processors=132, max_seqs=16).num_splits == 3
    assert choose_decode_tile(full, "sm_90", num_processors=132, max_seqs=1).num_splits == 32
    window = replace(full, window=1024)
    assert choose_decode_tile(window, "sm_90", num_processors=132, max_seqs=1).num_splits == 4


BUILDS = {
    "sm_80": ("int8", {"HMMA"}, {"HMMA"}),
    "sm_89": ("fp8", {"HMMA"}, {"HMMA"}),
    "sm_90": ("fp8", {"HGMMA"}, {"HMMA"}),
    "sm_100": ("fp8", {"UTCHMMA"}, {"HMMA"}),
    "gfx942": ("fp8", {"v_mfma_f32_32x32x8_bf16"}, {"v_mfma_f32_16x16x16_f16"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("arch", BUILDS)
def test_real_sizes_build_with_matrix_instructions(build_for, arch):
    """`build_for` also checks spills and shared memory."""
    small, prefill_with, decode_with = BUILDS[arch]
    fp8_type = "fp8e4b8" if arch == "gfx942" else "fp8e4nv"
    plain, quantised = problem(32, 8, 128), problem(16, 8, 256, small, window=4096, softcap=50.0, fp8_type=fp8_type)
    kernels = [
        (prefill_kernel(plain, choose_prefill_tile(plain, arch)), prefill_with),
        (decode_kernel(quantised, choose_decode_tile(quantised, arch, num_processors=132, max_seqs=4)), decode_with),
    ]
    built = build_for(arch, [kernel for kernel, _ in kernels])
    for kernel, expected in kernels:
        assert expected <= set(built[kernel.name].matrix_instructions)
