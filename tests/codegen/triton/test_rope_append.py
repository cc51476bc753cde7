"""Norms, rotary embedding and the append to the paged pool against float64, and the kernel's own sine and cosine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from llmc.codegen.triton.attention import AttentionProblem, RopeSettings, append_kernel, layer_bytes
from llmc.errors import TargetError
from llmc.runtime.executor.interpretation import InterpretedKernel, Pointer

LAYERS = 3
LAYER = 1  # the one that is written
SENTINEL = 0x7FC1  # a bf16 NaN that no kernel writes
LARGEST = {"int8": 127, "fp8e4nv": 448, "fp8e4b8": 240}
ROUNDED = 2.0**-8  # largest relative error of a bf16


def problem(heads: int, kv_heads: int, head_dim: int, kv_format: str = "bf16", **settings: Any) -> AttentionProblem:
    size = layer_bytes(kv_heads, head_dim, kv_format)
    return AttentionProblem(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        kv_format=kv_format,
        bytes_per_block=LAYERS * size,
        **{"scale": 1.0} | settings,
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


def normed(x: np.ndarray, weight: np.ndarray | None, eps: float) -> np.ndarray:
    return x if weight is None else x / np.sqrt(np.square(x).mean(-1, keepdims=True) + eps) * weight.astype(np.float64)


def turned(x: np.ndarray, positions: np.ndarray, inv_freq: np.ndarray, scaling: float) -> np.ndarray:
    """`x [T, H, D]`; the angle is a float32, as in the kernel."""
    half = len(inv_freq)
    angle = (positions.astype(np.float32)[:, None, None] * inv_freq).astype(np.float64)
    cos, sin = np.cos(angle) * scaling, np.sin(angle) * scaling
    first, second = x[..., :half], x[..., half : 2 * half]
    return np.concatenate((first * cos - second * sin, second * cos + first * sin, x[..., 2 * half :]), -1)


class Step:
    """A step of sequences `(context_len, new tokens)`, run on a pool of bytes 0xFF."""

    def __init__(self, settings: AttentionProblem, rope: RopeSettings, sequences: list[tuple[int, int]], seed: int = 0) -> None:
        self.settings, self.rope, s = settings, rope, settings
        self.random = random = np.random.default_rng(seed)
        self.query_start = np.cumsum([0] + [new for _, new in sequences], dtype=np.int32)
        spans = [np.arange(length - new, length) if length else np.full(new, -1) for length, new in sequences]
        self.positions = np.concatenate(spans).astype(np.int32)
        self.tokens = len(self.positions)
        self.sequence = np.repeat(np.arange(len(sequences)), [new for _, new in sequences])
        needed = [-(-length // 16) for length, _ in sequences]
        self.table = np.full((len(sequences), max(needed) + 2), -1, np.int32)
        blocks = 1 + random.permutation(sum(needed) + 3).astype(np.int32)  # block 0 holds nothing either
        self.pool = np.full((len(blocks) + 1, s.bytes_per_block), 0xFF, np.uint8)
        for row, count in zip(self.table, needed, strict=True):
            row[:count], blocks = blocks[:count], blocks[count:]
        width = (s.num_heads + 2 * s.num_kv_heads) * s.head_dim
        self.qkv = np.full((self.tokens, -(-width // 16) * 16), SENTINEL, np.uint16)
        self.qkv[:, :width] = to_bf16(random.standard_normal((self.tokens, width)) * 2)
        self.qkv[self.positions < 0] = SENTINEL
        self.norms = {
            name: random.uniform(0.5, 1.5, s.head_dim).astype(np.float32)
            for name in ("q_norm", "k_norm")
            if getattr(rope, name)
        }
        self.inv_freq = (1e4 ** -np.linspace(0, 1, rope.rotary // 2)).astype(np.float32)
        self.q_out = np.full((self.tokens + 1, s.num_heads * s.head_dim), SENTINEL, np.uint16)

    def run(self, launch: Callable[..., None]) -> None:
        s = self.settings
        scales = {"kv_scales": self.pool} if s.kv_format != "bf16" else {}
        arguments = {
            "qkv": self.qkv,
            **self.norms,
            "inv_freq": self.inv_freq,
            "q_out": self.q_out,
            "kv_pool": self.pool,
            **scales,
        }
        arguments |= {"positions": self.positions, "query_start": self.query_start, "block_table": self.table}
        arguments |= {"num_tokens": self.tokens, "num_seqs": len(self.table), "max_blocks": self.table.shape[1]}
        arguments["layer_offset"] = LAYER * layer_bytes(s.num_kv_heads, s.head_dim, s.kv_format)
        launch(append_kernel(s, self.rope), arguments, T=self.tokens, R=1, B=len(self.table))

    def expected(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Queries `[T, Hq*D]`, keys and values `[T, Hkv, D]`."""
        s, rope = self.settings, self.rope
        width = (s.num_heads + 2 * s.num_kv_heads) * s.head_dim
        heads = from_bf16(self.qkv[:, :width]).reshape(self.tokens, -1, s.head_dim)
        heads[self.positions < 0] = 0
        q, k, v = np.split(heads, [s.num_heads, s.num_heads + s.num_kv_heads], 1)
        q, k = normed(q, self.norms.get("q_norm"), rope.norm_eps), normed(k, self.norms.get("k_norm"), rope.norm_eps)
        q, k = (turned(x, self.positions, self.inv_freq, rope.scaling) for x in (q, k))
        return q.reshape(self.tokens, -1), k, v

    def stored(self) -> tuple[np.ndarray, np.ndarray]:
        """What lies in the pool for every token, items and scales `[T, 2, Hkv, ...]`; takes it out, so that 0xFF is left."""
        s = self.settings
        size, item = layer_bytes(s.num_kv_heads, s.head_dim, s.kv_format), 2 if s.kv_format == "bf16" else 1
        count = 2 * s.num_kv_heads * 16 * s.head_dim * item
        items, scales = [], []
        for sequence, position in zip(self.sequence, self.positions, strict=True):
            if position < 0:
                continue
            layer = self.pool[self.table[sequence, position // 16], LAYER * size : (LAYER + 1) * size]
            rows = layer[:count].reshape(2, s.num_kv_heads, 16, -1)[:, :, position % 16]
            items.append(rows.copy())
            rows[...] = 0xFF
            if item == 1:
                rows = layer[count : count + 2 * s.num_kv_heads * 64].reshape(2, s.num_kv_heads, 16, 4)[:, :, position % 16]
                scales.append(rows.copy().view(np.float32)[..., 0])
                rows[...] = 0xFF
        return np.array(items), np.array(scales, np.float64)

    def check(self) -> None:
        s, real = self.settings, self.positions >= 0
        q, k, v = self.expected()
        assert np.abs(from_bf16(self.q_out[:-1]) - q).max() / np.abs(q).max() < ROUNDED + 1e-5  # NaN fails too
        assert (self.q_out[:-1][~real] & 0x7FFF == 0).all()
        assert (self.q_out[-1] == SENTINEL).all()
        items, scales = self.stored()
        assert (self.pool == 0xFF).all()  # nothing else was written
        wanted = np.stack((k, v), 1)[real]
        if s.kv_format == "bf16":
            decoded = from_bf16(items.view(np.uint16))
            assert (np.abs(decoded - wanted) <= ROUNDED * np.abs(wanted) + 1e-5).all()
            np.testing.assert_array_equal(decoded[:, 1], wanted[:, 1])
            return
        largest = LARGEST["int8" if s.kv_format == "int8" else s.fp8_type]
        np.testing.assert_allclose(scales, np.abs(wanted).max(-1) / largest, rtol=1e-5)
        if s.kv_format == "int8":
            codes, step = items.view(np.int8).astype(float), np.full(items.shape, 0.5)
        else:
            codes = from_fp8(items, s.fp8_type)
            step = np.maximum(np.abs(codes) * 2.0**-4, 2.0**-10)  # half of the last of four digits, or of a subnormal
        assert (np.abs(codes - wanted / scales[..., None]) <= step * 1.01 + 1e-3).all()
        assert (np.abs(codes).max(-1) == largest).all()


MIXED = [(5, 5), (1, 1), (33, 7), (0, 2), (16, 16), (48, 1), (0, 0), (17, 3)]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "kv_format", "settings", "rope"),
    [
        (2, 2, 64, "bf16", {}, {"rotary": 64}),
        (4, 1, 128, "int8", {}, {"rotary": 128, "q_norm": True, "k_norm": True, "norm_eps": 1e-5}),
        (7, 1, 80, "fp8", {}, {"rotary": 80}),
        (8, 1, 96, "bf16", {}, {"rotary": 96, "scaling": 1.19, "k_norm": True}),
        (9, 1, 256, "fp8", {"fp8_type": "fp8e4b8"}, {"rotary": 256, "q_norm": True, "k_norm": True}),
        (4, 2, 20, "int8", {}, {"rotary": 10, "q_norm": True}),
        (6, 2, 24, "fp8", {}, {"rotary": 12, "q_norm": True, "k_norm": True, "scaling": 0.5}),
    ],
)
def test_mixed_batch(launch, heads, kv_heads, head_dim, kv_format, settings, rope):
    step = Step(problem(heads, kv_heads, head_dim, kv_format, **settings), RopeSettings(**rope), MIXED)
    step.run(launch)
    step.check()


@pytest.mark.parametrize("kv_format", ["bf16", "int8", "fp8"])
def test_rows_of_zeros(launch, kv_format):
    step = Step(problem(2, 1, 16, kv_format), RopeSettings(rotary=16, q_norm=True, k_norm=True), [(3, 3)])
    step.qkv[...] = 0
    step.run(launch)
    items, scales = step.stored()
    assert (items & 0x7F == 0).all()
    assert np.isfinite(scales).all()
    assert (step.q_out[:-1] & 0x7FFF == 0).all()


@pytest.mark.parametrize("sequences", [1, 2, 256, 257, 600])
def test_tokens_find_their_sequence(launch, sequences):
    step = Step(
        problem(2, 1, 16), RopeSettings(rotary=16), [(int(n > 0) * (n + 7), n) for n in np.arange(1, sequences + 1) % 3]
    )
    step.run(launch)
    step.check()


def test_long_contexts(launch):
    step = Step(problem(2, 1, 16), RopeSettings(rotary=16), [(131072, 2), (40000, 1)])
    step.run(launch)
    step.check()


def test_sine_and_cosine():
    """Absolute errors of at most 3e-7 for float32 angles up to 131072, against float64."""
    source = append_kernel(problem(2, 1, 16), RopeSettings(rotary=16)).source()
    begin = source.index("@triton.jit\ndef sincos")
    function = source[begin : source.index("@triton.jit", begin + 1)]
    probe = (
        f"import triton\nimport triton.language as tl\n\n{function}@triton.jit\ndef probe(x, sine, cosine):\n"
        "    at = tl.program_id(0) * 4096 + tl.arange(0, 4096)\n    s, c = sincos(tl.load(x + at))\n"
        "    tl.store(sine + at, s)\n    tl.store(cosine + at, c)\n"
    )
    random = np.random.default_rng(0)
    edges = np.arange(0, 83443, 7) * (np.pi / 4)  # multiples of an eighth of a turn are the hardest
    x = np.concatenate((random.uniform(0, 131072, 30000), random.uniform(0, 7, 10000), edges, [0.0, 131072.0])).astype(
        np.float32
    )
    x = np.concatenate((x, np.nextafter(x, np.float32(np.inf)), -x[:500]))
    x = np.pad(x, (0, -len(x) % 4096))
    sine, cosine = np.empty_like(x), np.empty_like(x)
    pointers = [Pointer(array.ctypes.data, "*fp32") for array in (x, sine, cosine)]
    InterpretedKernel(probe, "probe", "probe.py").launch((len(x) // 4096, 1, 1), pointers)
    assert np.abs(sine - np.sin(x.astype(np.float64))).max() < 3e-7
    assert np.abs(cosine - np.cos(x.astype(np.float64))).max() < 3e-7


def test_names_tell_settings_apart():
    base, rope = problem(8, 2, 64), RopeSettings(rotary=64, q_norm=True)
    changes = [{"rotary": 32}, {"q_norm": False}, {"k_norm": True}, {"norm_eps": 1e-5}, {"scaling": 1.25}]
    names = [append_kernel(base, r).name for r in (rope, *(replace(rope, **change) for change in changes))]
    names.append(append_kernel(replace(base, bytes_per_block=64), rope).name)
    assert len(set(names)) == len(names)
    assert all(name.isidentifier() for name in names)


@pytest.mark.parametrize("rotary", [0, 15, 66])
def test_impossible_rotations_are_refused(rotary):
    with pytest.raises(TargetError, match="rope: "):
        append_kernel(problem(8, 2, 64), RopeSettings(rotary=rotary))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90", "sm_100", "gfx942"])
def test_real_sizes_build(build_for, arch):
    """`build_for` checks that nothing is spilled: no stack, so no slow sine."""
    fp8 = {"sm_80": {"kv_format": "int8"}, "gfx942": {"kv_format": "fp8", "fp8_type": "fp8e4b8"}}.get(
        arch, {"kv_format": "fp8"}
    )
    normed = RopeSettings(rotary=256, q_norm=True, k_norm=True)
    build_for(
        arch,
        [
            append_kernel(problem(32, 8, 128), RopeSettings(rotary=128)),
            append_kernel(problem(8, 4, 256, **fp8), normed),
            append_kernel(problem(32, 32, 80, **fp8), RopeSettings(rotary=32)),
        ],
    )
