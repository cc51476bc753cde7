"""The kernels of each level that this machine runs, behind numpy arrays; every output is poisoned and guarded."""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from llmc.codegen.cpu import kv_layout, packing, toolchain
from llmc.codegen.cpu.formats import MatrixFormat
from llmc.errors import ToolchainError
from llmc.formats.floats import from_bf16, to_bf16
from llmc.formats.grid import MatrixValue
from llmc.passes.kv_formats import is_packed
from llmc.runtime.executor.abi import Model, StepArgs
from llmc.runtime.program import KV_SLOT_BLOCKS, kv_head_bytes

SOURCE = Path(__file__).parent / "kernels_under_test.cpp"
FORMATS = {kind: number for number, kind in enumerate(get_args(packing.Format))}
EMULATED = "amx-emulated"
EPILOGUES = {"none": 0, "glu_silu": 1, "glu_gelu_tanh": 2, "glu_gelu": 3}
GUARD = 24
POISON = np.float32(np.nan)
Array = np.ndarray[Any, np.dtype[Any]]


class Sampling(ctypes.Structure):
    _fields_ = (
        ("temperature", ctypes.c_float),
        ("top_k", ctypes.c_int32),
        ("top_p", ctypes.c_float),
        ("min_p", ctypes.c_float),
        ("seed", ctypes.c_uint64),
        ("offset", ctypes.c_uint64),
    )


class RopeArgs(ctypes.Structure):
    _fields_ = (
        ("qkv", ctypes.c_void_p),
        ("HQ", ctypes.c_int),
        ("HKV", ctypes.c_int),
        ("q_norm", ctypes.c_void_p),
        ("k_norm", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("inv_freq", ctypes.c_void_p),
        ("rotary_dim", ctypes.c_int),
        ("attention_scaling", ctypes.c_float),
        ("place", ctypes.c_int64 * 4),
    )


class AttentionCall(ctypes.Structure):
    _fields_ = (
        ("qkv", ctypes.c_void_p),
        ("ldq", ctypes.c_int),
        ("HQ", ctypes.c_int),
        ("HKV", ctypes.c_int),
        ("place", ctypes.c_int64 * 4),
        ("scale", ctypes.c_float),
        ("window", ctypes.c_int),
        ("softcap", ctypes.c_float),
        ("out", ctypes.c_void_p),
        ("ldo", ctypes.c_int),
        ("workspace", ctypes.c_void_p),
    )


def pointer(array: Array | None) -> ctypes.c_void_p:
    if array is None:
        return ctypes.c_void_p(None)
    assert array.flags.c_contiguous
    return ctypes.c_void_p(array.ctypes.data)


def aligned(size: int, fill: int = 0xFF) -> Array:
    """Bytes on a 64-byte boundary, NaN in every float type unless filled otherwise."""
    raw: Array = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    view = raw[start : start + size]
    view.fill(fill)
    return view


@dataclass
class Matrix:
    """A packed matrix and the float64 values it stands for (for a pair: gate rows, then up rows)."""

    format: MatrixFormat
    values: Array
    data: Array
    scale: Array | None
    rows: int  # of the output: half of a pair's
    k: int

    @property
    def kind(self) -> str:
        return self.format.kind

    @property
    def group(self) -> int:
        return self.format.group or 0


def make_matrix(
    kind: Any, n: int, k: int, *, group: int = 32, pair: bool = False, seed: int = 0, value: MatrixValue | None = None
) -> Matrix:
    """`value`, or random numbers, of shape `[n, k]`; for a pair two such matrices."""
    rng = np.random.default_rng(seed)
    format = MatrixFormat(kind=kind, group=group if kind not in ("f32", "f16", "bf16", "i8") else None)
    parts = [rng.standard_normal((n, k)).astype(np.float32) if value is None else value for _ in range(2 if pair else 1)]
    halves = [format.pack(part) for part in parts]
    values = np.concatenate([format.unpack(half, (n, k)) for half in halves]).astype(np.float64)
    data, *scales = [packing.interleave(*both) for both in zip(*halves, strict=True)] if pair else halves[0]
    return Matrix(format, values, _on_boundary(data), scales[0] if scales else None, n, k)


def _on_boundary(array: Array) -> Array:
    view = aligned(array.nbytes).view(array.dtype)
    view[:] = array.reshape(-1)
    placed: Array = view.reshape(array.shape)
    return placed


KV = ("f32", "bf16", "fp8", "int8", "int4")


@dataclass
class Cache:
    """A KV pool with one block table and slot for each sequence, all scattered; unwritten content is NaN."""

    dim: int
    kv_heads: int
    dtype: str
    lengths: Sequence[int]  # most tokens of each sequence
    layers: int = 2
    layer: int = 1
    seed: int = 0
    table: Array = field(init=False)
    pool: Array = field(init=False)
    slots: Array = field(init=False)
    slot_start: Array = field(init=False)
    slot_memory: Array = field(init=False)

    def __post_init__(self) -> None:
        blocks = [-(-length // 16) for length in self.lengths]
        rng = np.random.default_rng(self.seed)
        order = rng.permutation(sum(blocks) + 3).astype(np.int32)
        self.table = np.full((len(blocks), max(blocks)), -1_000_000_000, np.int32)
        for i, (start, count) in enumerate(zip(itertools.accumulate([0, *blocks]), blocks, strict=False)):
            self.table[i, :count] = order[start : start + count]
        self.pool = aligned((sum(blocks) + 3) * self.block_bytes)
        self.slots = rng.permutation(len(blocks) + 2).astype(np.int32)[: len(blocks)].copy()
        self.slot_start = np.zeros(len(blocks), np.int32)
        self.slot_memory = aligned((len(blocks) + 2) * self.slot_bytes)

    @property
    def layer_bytes(self) -> int:
        return 2 * self.kv_heads * 16 * kv_head_bytes(self.dtype, self.dim)

    @property
    def block_bytes(self) -> int:
        return self.layers * self.layer_bytes

    @property
    def slot_bytes(self) -> int:
        return self.layers * KV_SLOT_BLOCKS * 2 * self.kv_heads * 16 * self.dim * 2

    @property
    def place(self) -> tuple[int, int, int, int]:
        """Offset of the layer in a block, bytes of a block, offset of the layer in a slot, bytes of a slot."""
        return (
            self.layer * self.layer_bytes,
            self.block_bytes,
            self.layer * self.slot_bytes // self.layers,
            self.slot_bytes,
        )

    def token(self, sequence: int, position: int) -> tuple[Array, Array]:
        """Keys and values `[kv_heads, dim]` of one position, read as docs/bundle.md lays them out."""
        start = int(self.table[sequence, position // 16]) * self.block_bytes + self.layer * self.layer_bytes
        layer = self.pool[start : start + self.layer_bytes]
        slot, heads, dim = position % 16, self.kv_heads, self.dim
        if self.dtype == "f32":
            k, v = layer.view(np.float32).reshape(2, -1)
            return k.reshape(heads, dim, 16)[:, :, slot], v.reshape(heads, 16, dim)[:, slot]
        if self.dtype == "bf16":
            k, v = from_bf16(layer.view(np.uint16)).reshape(2, -1)
            return k.reshape(heads, dim // 2, 16, 2)[:, :, slot].reshape(heads, dim), v.reshape(heads, 16, dim)[:, slot]
        if self.dtype == "int4":
            return self._int4(layer, slot)
        numbers, scales = layer[: 2 * heads * dim * 16].reshape(2, -1), layer[2 * heads * dim * 16 :].view(np.float32)
        scales = scales.reshape(2, heads, 16)[:, :, slot, None]
        both = numbers[0].reshape(heads, dim, 16)[:, :, slot], numbers[1].reshape(heads, 16, dim)[:, slot]
        if self.dtype == "int8":
            return both[0].view(np.int8) * scales[0], both[1].view(np.int8) * scales[1]
        return E4M3[both[0]] * scales[0], E4M3[both[1]] * scales[1]

    def _int4(self, layer: Array, slot: int) -> tuple[Array, Array]:
        heads, groups = self.kv_heads, -(-self.dim // 32)
        size = 2 * heads * groups * 16 * 16
        k, v = layer[:size].reshape(2, -1)
        k_scale, v_scale = from_bf16(layer[size:].view(np.uint16)).reshape(2, -1)
        k = k.reshape(heads, groups * 16, 16)[:, :, slot]  # pairs of channels
        v = v.reshape(heads, 16, groups, 16)[:, slot]  # halves of groups
        keys = np.stack((k & 15, k >> 4), axis=-1).reshape(heads, groups, 32).astype(np.float32) - 8
        values = np.stack((v & 15, v >> 4), axis=-2).reshape(heads, groups, 32).astype(np.float32) - 8
        keys *= k_scale.reshape(heads, groups, 16)[:, :, slot, None]
        values *= v_scale.reshape(heads, 16, groups)[:, slot, :, None]
        rounded = (from_bf16(to_bf16(x)) for x in (keys, values))  # what attention reads
        first, second = (x.reshape(heads, -1)[:, : self.dim] for x in rounded)
        return first, second


def _e4m3_values() -> Array:
    """Of all 256 codes, from the definition; NaN for the two that are."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    values = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    values[(codes & 127) == 127] = np.nan
    return np.where(codes > 127, -values, values).astype(np.float32)


E4M3 = _e4m3_values()


class Kernels:
    """One level's kernels."""

    def __init__(self, path: Path, level: str) -> None:
        self.level = level
        self.lib = ctypes.CDLL(str(path))
        self.lib.test_operand_bytes.restype = ctypes.c_int64
        self.lib.test_workspace_bytes.restype = ctypes.c_int64

    def pack_rows(self, kind: str, x: Array, group: int = 32, threads: int = 1) -> Array:
        if self.level == EMULATED and kind not in ("bf16", "i8"):
            pytest.skip("formats without AMX tiles are not built where AMX is emulated")
        rows, k = x.shape
        operand = aligned(rows * self.lib.test_operand_bytes(FORMATS[kind], k, group))
        self.lib.test_pack_rows(FORMATS[kind], pointer(x), rows, k, group, pointer(operand), threads)
        return operand

    def linear(self, x: Array, w: Matrix, *, bias: Array | None = None, epilogue: str = "none", threads: int = 1) -> Array:
        """`x [rows, K]` times the matrix; fails if a column beyond N is written."""
        rows = x.shape[0]
        operand = self.pack_rows(w.kind, x, w.group, threads)
        return self.linear_packed(operand, rows, w, bias=bias, epilogue=epilogue, threads=threads)

    def linear_packed(
        self,
        operand: Array,
        rows: int,
        w: Matrix,
        *,
        bias: Array | None = None,
        epilogue: str = "none",
        threads: int = 1,
    ) -> Array:
        out = np.full((rows + 1, w.rows + GUARD), POISON, np.float32)
        self.lib.test_linear(
            FORMATS[w.kind],
            EPILOGUES[epilogue],
            pointer(operand),
            pointer(w.data),
            pointer(w.scale),
            w.group,
            pointer(bias),
            rows,
            w.rows,
            w.k,
            pointer(out),
            out.shape[1],
            threads,
        )
        assert np.isnan(out[rows]).all(), "a row beyond the last was written"
        assert np.isnan(out[:, w.rows :]).all(), "a column beyond N was written"
        assert not np.isnan(out[:rows, : w.rows]).any(), "an output was not written"
        return out[:rows, : w.rows]

    def rms_norm(self, x: Array, weight: Array, eps: float, threads: int = 1) -> Array:
        rows, width = x.shape
        out = np.full(rows * width + GUARD, POISON, np.float32)
        self.lib.test_rms_norm(pointer(x), pointer(weight), ctypes.c_float(eps), rows, width, pointer(out), threads)
        assert np.isnan(out[rows * width :]).all()
        return out[: rows * width].reshape(rows, width)

    def residual_norm(
        self,
        x: Array,
        weight: Array,
        *,
        post: Array | None = None,
        residual: Array | None = None,
        kind: str | None = None,
        group: int = 32,
        threads: int = 1,
    ) -> Array:
        """Floats, or the packed operand if `kind` is given; `residual` is updated in place."""
        rows, width = x.shape
        row_bytes = 4 * width if kind is None else self.lib.test_operand_bytes(FORMATS[kind], width, group)
        out = aligned(rows * row_bytes)
        self.lib.test_residual_norm(
            int(post is not None),
            int(residual is not None),
            -1 if kind is None else FORMATS[kind],
            group,
            rows,
            width,
            pointer(x),
            pointer(post),
            ctypes.c_float(1e-5),
            pointer(residual),
            pointer(weight),
            ctypes.c_float(1e-6),
            pointer(out),
            threads,
        )
        return out.view(np.float32).reshape(rows, width) if kind is None else out

    def embedding(self, ids: Array, w: Matrix, multiplier: float, threads: int = 1) -> Array:
        if self.level == EMULATED:
            pytest.skip("embeddings are those of the AVX-512 level")
        out = np.full(len(ids) * w.k + GUARD, POISON, np.float32)
        step = StepArgs(num_tokens=len(ids), token_ids=pointer(ids))
        self.lib.test_embedding(
            FORMATS[w.kind],
            ctypes.byref(step),
            pointer(w.data),
            pointer(w.scale),
            w.group,
            w.rows,
            w.k,
            ctypes.c_float(multiplier),
            pointer(out),
            threads,
        )
        assert np.isnan(out[len(ids) * w.k :]).all()
        return out[: len(ids) * w.k].reshape(-1, w.k)

    def rope_append(
        self,
        cache: Cache,
        qkv: Array,
        heads: int,
        starts: Sequence[int],
        counts: Sequence[int],
        inv_freq: Array,
        *,
        q_norm: Array | None = None,
        k_norm: Array | None = None,
        scaling: float = 1.0,
        rotate: bool = False,
        threads: int = 1,
    ) -> None:
        """Rotates `qkv [T, heads + 2 kv_heads, dim]` in place and writes the cache.

        Sequence i has `counts[i]` tokens from position `starts[i]`.
        """
        with_step = self._step(cache, starts, counts, threads)
        args = RopeArgs(
            qkv=pointer(qkv),
            HQ=heads,
            HKV=cache.kv_heads,
            q_norm=pointer(q_norm),
            k_norm=pointer(k_norm),
            eps=1e-6,
            inv_freq=pointer(inv_freq),
            rotary_dim=2 * len(inv_freq),
            attention_scaling=scaling,
            place=cache.place,
        )
        failed = self.lib.test_rope_append(
            *with_step.pointers, cache.dim, KV.index(cache.dtype), int(rotate), ctypes.byref(args)
        )
        assert not failed, "head_dim is not instantiated in kernels_under_test.cpp"

    def attention(
        self,
        cache: Cache,
        qkv: Array,
        heads: int,
        starts: Sequence[int],
        counts: Sequence[int],
        *,
        decode: bool = False,
        scale: float = 0.25,
        window: int = 0,
        softcap: float = 0.0,
        threads: int = 1,
    ) -> Array:
        """`[T, heads, dim]` for rotated queries `qkv [T, heads + 2 kv_heads, dim]`."""
        tokens, width = qkv.shape[0], heads * cache.dim
        with_step = self._step(cache, starts, counts, threads)
        out = np.full((tokens, width + GUARD), POISON, np.float32)
        size = kv_layout.attention_workspace_bytes(tokens, heads, cache.dim, packed=is_packed(cache.dtype), threads=threads)
        workspace = aligned(size + 256)
        call = AttentionCall(
            qkv=pointer(qkv),
            ldq=(heads + 2 * cache.kv_heads) * cache.dim,
            HQ=heads,
            HKV=cache.kv_heads,
            place=cache.place,
            scale=scale,
            window=window,
            softcap=softcap,
            out=pointer(out),
            ldo=out.shape[1],
            workspace=pointer(workspace),
        )
        failed = self.lib.test_attention(*with_step.pointers, cache.dim, KV.index(cache.dtype), int(decode), ctypes.byref(call))
        assert not failed, "head_dim is not instantiated in kernels_under_test.cpp"
        assert np.isnan(out[:, width:]).all(), "a column beyond the heads was written"
        assert (workspace[size:] == 0xFF).all(), "the workspace overflowed"
        return out[:, :width].reshape(tokens, heads, cache.dim)

    def sample(
        self,
        logits: Array,
        params: Sequence[Sampling],
        *,
        threads: int = 1,
        logprobs: bool = True,
    ) -> tuple[Array, Array]:
        rows, vocab = logits.shape
        ids, logp = np.full(rows, -1, np.int32), np.full(rows, POISON, np.float32)
        array = (Sampling * rows)(*params)
        self.lib.llmc_sample(pointer(logits), rows, vocab, array, threads, pointer(ids), pointer(logp if logprobs else None))
        return ids, logp

    def _step(self, cache: Cache, starts: Sequence[int], counts: Sequence[int], threads: int) -> _Step:
        if self.level == EMULATED:
            pytest.skip("attention has no use for AMX")
        return _Step(cache, starts, counts, threads)


class _Step:
    """The C structs of a step, and the arrays they point to, for as long as it lives."""

    def __init__(self, cache: Cache, starts: Sequence[int], counts: Sequence[int], threads: int) -> None:
        positions = [range(s, s + c) for s, c in zip(starts, counts, strict=True)]
        self.positions = np.array(list(itertools.chain(*positions)), np.int32)
        self.query_start = np.cumsum([0, *counts]).astype(np.int32)
        self.context_len = (np.array(starts) + np.array(counts)).astype(np.int32)
        self.table = cache.table
        tokens = len(self.positions)
        self.slots, self.slot_start = cache.slots, cache.slot_start
        self.model = Model(
            kv_pool=pointer(cache.pool), kv_slots=pointer(cache.slot_memory), max_tokens=tokens, num_threads=threads
        )
        self.step = StepArgs(
            num_tokens=tokens,
            num_seqs=len(counts),
            max_blocks=self.table.shape[1],
            positions=pointer(self.positions),
            query_start=pointer(self.query_start),
            context_len=pointer(self.context_len),
            block_table=pointer(self.table),
            slots=pointer(self.slots),
            slot_start=pointer(self.slot_start),
        )
        self.pointers = (ctypes.byref(self.model), ctypes.byref(self.step))


@pytest.fixture(scope="session")
def compiler() -> toolchain.Compiler:
    try:
        return toolchain.find_compiler()
    except ToolchainError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def libraries(compiler: toolchain.Compiler, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A library for each level that this machine has. One without AMX gets it emulated, to test the tiles' logic."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with (shared / "kernels.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several workers one builds, on all cores; the others find its results
        return _build_libraries(compiler, tmp_path_factory.mktemp("kernels"), shared / "kernels")


def _build_libraries(compiler: toolchain.Compiler, folder: Path, cache: Path) -> dict[str, Path]:
    source = SOURCE.read_text()
    libraries = toolchain.compile_levels(source, folder, levels=["portable"], compiler=compiler, cache=cache)
    highest = ctypes.CDLL(str(libraries["portable"])).llmc_cpu_level()
    levels = [level for level in list(toolchain.LEVEL_FLAGS)[1 : highest + 1] if level in compiler.levels]
    jobs = {level: (source, level) for level in levels}
    if "avx512" in levels and "amx" not in levels:
        jobs[EMULATED] = ((SOURCE.parent / "amx_emulation.hpp").read_text() + source, "avx512")

    def build(name: str) -> Path:
        text, level = jobs[name]
        return toolchain.compile_library(text, level, folder / f"lib{name}.so", compiler=compiler, cache=cache)

    with ThreadPoolExecutor() as pool:
        return {**libraries, **dict(zip(jobs, pool.map(build, jobs), strict=True))}


@pytest.fixture(scope="session", params=[*toolchain.LEVEL_FLAGS, EMULATED])
def kernels(request: pytest.FixtureRequest, libraries: dict[str, Path]) -> Kernels:
    """Each level that this machine has."""
    level: str = request.param
    if level not in libraries:
        pytest.skip(f"this machine has no {level}")
    return Kernels(libraries[level], level)


@pytest.fixture(scope="session")
def matrix() -> Any:
    return make_matrix


@pytest.fixture(scope="session")
def new_cache() -> type[Cache]:
    return Cache


@pytest.fixture(scope="session")
def sampling() -> type[Sampling]:
    return Sampling
