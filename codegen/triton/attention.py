"""The attention kernels over the paged KV pool: rotary embedding with the append to it, prefill and decode."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from ...errors import TargetError
from ...formats.floats import round_up
from .kernel import ONE, Extent, Kernel, Parameter, Setting

KvFormat: TypeAlias = Literal["bf16", "fp8", "int8"]
Fp8Type: TypeAlias = Literal["fp8e4nv", "fp8e4b8"]

BLOCK_SIZE = 16  # tokens in a block of the pool
_ALIGN = 64  # bytes: where layers start and how far blocks are apart
_LOG2E = math.log2(math.e)
_ROW_ALIGN = 16  # channels to which rows of linear inputs and outputs are padded
_MIN_DOT = 16  # rows and channels of the smallest matrix instruction
_LARGEST = {"int8": 127.0, "fp8e4nv": 448.0, "fp8e4b8": 240.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionProblem:
    """What an attention layer computes and where its keys and values lie; layers with equal problems share their kernels.

    Softmax of `scale * q k`, with `softcap` first bent to `softcap * tanh(. / softcap)` (0 is off). A token sees the last `window`
    tokens, itself included; 0 is all of them. `bytes_per_block` is the size of a pool block with all layers, a multiple of 64; where
    the layer starts in it is the kernels' argument `layer_offset` (bytes, a multiple of 64). `fp8_type` is `fp8e4nv`, or `fp8e4b8`
    on gfx942.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    softcap: float = 0.0
    kv_format: KvFormat = "bf16"
    fp8_type: Fp8Type = "fp8e4nv"
    bytes_per_block: int

    def __post_init__(self) -> None:
        """Refuse what the kernels do not compute."""
        if self.num_heads % self.num_kv_heads:
            raise TargetError(f"attention: {self.num_heads} query heads are not a multiple of {self.num_kv_heads} KV heads")
        if self.bytes_per_block % _ALIGN:
            raise TargetError(f"attention: bytes_per_block={self.bytes_per_block} is not a multiple of {_ALIGN}")
        if self.scale <= 0:
            raise TargetError(f"attention: scale={self.scale} is not positive")

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def stored_type(self) -> str:
        """Triton's name of the type of stored keys and values."""
        return {"bf16": "bf16", "int8": "i8", "fp8": self.fp8_type}[self.kv_format]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSettings:
    """What happens to queries and keys before attention.

    RMS norms over a head where `q_norm` and `k_norm` say so, then channels i and i + rotary/2 of the first `rotary` are turned; cos and
    sin are multiplied by `scaling`.
    """

    rotary: int
    q_norm: bool = False
    k_norm: bool = False
    norm_eps: float = 1e-6
    scaling: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTile:
    """A program computes `block_m` rows (tokens times the heads of a KV head), `block_n` keys at a time.

    With `convert_once`, stored fp8 and int8 items are converted in one place and exchanged; else where they are multiplied.
    """

    block_m: int
    block_n: int
    convert_once: bool = False
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTile:
    """Up to `num_splits` programs share a context, each with at least `min_tiles` tiles of `block_n` keys."""

    block_n: int
    num_splits: int
    min_tiles: int = 1
    num_warps: int
    num_stages: int


def layer_bytes(num_kv_heads: int, head_dim: int, kv_format: KvFormat) -> int:
    """Bytes of one layer in a pool block, a multiple of 64.

    Keys `[Hkv, 16, D]`, values `[Hkv, 16, D]` and, unless bf16, float32 scales of the keys and of the values, `[Hkv, 16]` each.
    """
    rows = 2 * num_kv_heads * BLOCK_SIZE
    return round_up(rows * head_dim * 2 if kv_format == "bf16" else rows * (head_dim + 4), _ALIGN)


def append_kernel(problem: AttentionProblem, rope: RopeSettings) -> Kernel:
    """Norms and rotary embedding of queries and keys; keys and values go to the pool.

    Parameters, those left out that the settings do not use: qkv bf16 `[T, (Hq + 2*Hkv)*D up to a multiple of 16]`, q_norm and k_norm
    f32 `[D]`, inv_freq f32 `[rotary/2]`, q_out bf16 `[T, Hq*D]`, kv_pool, kv_scales (the same address, fp8 and int8), positions i32
    `[T]`, query_start i32 `[B+1]`, block_table i32 `[B, max_blocks]`, num_tokens, num_seqs, max_blocks, layer_offset i64. A token
    at a negative position writes zeros to q_out and nothing to the pool.
    """
    if rope.rotary % 2 or not 0 < rope.rotary <= problem.head_dim:
        raise TargetError(f"rope: {rope.rotary} rotated channels, expected an even number up to head_dim={problem.head_dim}")
    problem = replace(problem, scale=problem.head_dim**-0.5, window=0, softcap=0.0)  # none of which matters here
    half = rope.rotary // 2
    rest = problem.head_dim - rope.rotary
    block_t = max(1, 256 // power_of_two(half))  # eight pairs a thread, which are a 16-byte access
    parts = [f"rope_append_{_name(problem)}", f"r{rope.rotary}"]
    parts += ["qnorm"] * rope.q_norm + ["knorm"] * rope.k_norm
    if rope.q_norm or rope.k_norm:
        parts.append(f"eps{_identifier(rope.norm_eps)}")
    if rope.scaling != 1:
        parts.append(f"times{_identifier(rope.scaling)}")
    norms = {name: "*fp32" for name, used in (("q_norm", rope.q_norm), ("k_norm", rope.k_norm)) if used}
    return Kernel(
        name="_".join(parts),
        template="rope_append",
        settings=_settings(problem)
        | {
            "half": half,
            "padded_half": power_of_two(half),
            "rest": rest,
            "padded_rest": power_of_two(rest),
            "qkv_stride": round_up((problem.num_heads + 2 * problem.num_kv_heads) * problem.head_dim, _ROW_ALIGN),
            "q_norm": rope.q_norm,
            "k_norm": rope.k_norm,
            "norm_eps": rope.norm_eps,
            "scaling": rope.scaling,
            "block_t": block_t,
            "largest": _LARGEST["int8" if problem.kv_format == "int8" else problem.fp8_type],
        },
        parameters=_parameters(
            {"qkv": "*bf16", **norms, "inv_freq": "*fp32", "q_out": "*bf16"}
            | _pool(problem)
            | {"positions": "*i32", "query_start": "*i32", "block_table": "*i32", "num_tokens": "i32"}
        ),
        grid=(Extent(symbol="T", divisor=block_t), Extent(factor=problem.num_kv_heads), ONE),
        num_warps=1,
    )


def prefill_kernel(problem: AttentionProblem, tile: PrefillTile) -> Kernel:
    """Causal attention of any number of new tokens a sequence, the last of its context, over the pool (FlashAttention-2, Dao 2023).

    Parameters: q bf16 `[T, Hq*D]`, kv_pool, kv_scales (the same address, fp8 and int8), query_start i32 `[B+1]`, context_len i32 `[B]`
    with the new tokens, block_table i32 `[B, max_blocks]`, out bf16 `[T, Hq*D up to a multiple of 16]`, num_tokens, num_seqs,
    max_blocks, layer_offset i64. Tokens of a sequence with context_len 0 get zeros.
    """
    padded_group = power_of_two(problem.group)
    block_m = max(tile.block_m, padded_group)
    block_q = block_m // padded_group
    convert_once = tile.convert_once and problem.kv_format != "bf16"
    name = f"attention_prefill_{_name(problem)}_{block_m}x{tile.block_n}_w{tile.num_warps}_s{tile.num_stages}"
    return Kernel(
        name=name + "_once" * convert_once,
        template="attention_prefill",
        settings=_settings(problem)
        | {
            "block_m": block_m,
            "block_n": tile.block_n,
            "block_q": block_q,
            "convert_once": convert_once,
        },
        parameters=_parameters(
            {"q": "*bf16"}
            | _pool(problem)
            | {"query_start": "*i32", "context_len": "*i32", "block_table": "*i32", "out": "*bf16", "num_tokens": "i32"}
        ),
        grid=(Extent(symbol="T", divisor=block_q, add_sequences=True), Extent(factor=problem.num_kv_heads), ONE),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def decode_kernel(problem: AttentionProblem, tile: DecodeTile) -> Kernel:
    """Attention of one new token a sequence (token b is sequence b's) over the pool, with its keys split among programs (Flash-Decoding).

    Parameters: q bf16 `[B, Hq*D]`, kv_pool, kv_scales (the same address, fp8 and int8), context_len i32 `[B]`, block_table i32
    `[B, max_blocks]`, out bf16 `[B, Hq*D up to a multiple of 16]`, with several splits partials f32 and counters i32 (sizes:
    `workspace_bytes`; counters are zero before and after), num_seqs, max_blocks, layer_offset i64. context_len 0 gives zeros.
    """
    work = {"partials": "*fp32", "counters": "*i32"} if tile.num_splits > 1 else {}
    name = f"attention_decode_{_name(problem)}_n{tile.block_n}_w{tile.num_warps}_s{tile.num_stages}"
    if tile.num_splits > 1:
        name += f"_split{tile.num_splits}" + (f"_min{tile.min_tiles}" if tile.min_tiles > 1 else "")
    return Kernel(
        name=name,
        template="attention_decode",
        settings=_settings(problem)
        | {
            "rows": max(_MIN_DOT, power_of_two(problem.group)),
            "block_n": tile.block_n,
            "num_splits": tile.num_splits,
            "min_tiles": tile.min_tiles,
            "record": _record(problem),
        },
        parameters=_parameters(
            {"q": "*bf16"} | _pool(problem) | {"context_len": "*i32", "block_table": "*i32", "out": "*bf16", **work}
        ),
        grid=(Extent(symbol="B"), Extent(factor=problem.num_kv_heads), Extent(factor=tile.num_splits)),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def workspace_bytes(problem: AttentionProblem, tile: DecodeTile, max_seqs: int) -> tuple[int, int]:
    """Bytes of partials and of counters that the decode kernel needs for up to `max_seqs` sequences; (0, 0) for one split."""
    if tile.num_splits == 1:
        return 0, 0
    pairs = max_seqs * problem.num_kv_heads
    return 4 * pairs * tile.num_splits * _record(problem), 4 * pairs


# Rows, keys, warps and stages by head size: the largest that were found to build without spills, with windows and caps.
_WGMMA = {64: (128, 128, 8, 3), 128: (128, 64, 8, 3), 256: (128, 32, 8, 3)}
_WGMMA_QUANTISED = _WGMMA | {64: (128, 64, 8, 3)}
_MMA = {64: (128, 64, 8, 3), 128: (128, 32, 8, 3), 256: (64, 32, 8, 2)}
_MMA_QUANTISED = {64: (128, 32, 8, 3), 128: (64, 32, 4, 3), 256: (64, 32, 8, 2)}
_MFMA = {64: (128, 32, 4, 2), 128: (128, 32, 4, 2), 256: (64, 32, 4, 1)}
_PREFILL_TILES = {
    "sm_80": (_MMA, _MMA_QUANTISED),
    "sm_89": (_MMA, _MMA_QUANTISED),
    "sm_90": (_WGMMA, _WGMMA_QUANTISED),
    "sm_100": (_WGMMA, _WGMMA_QUANTISED),
    "gfx942": (_MFMA, _MFMA),
}
_SPLIT_KEYS = 256  # fewer keys in a split cost more to combine than they save
_MAX_SPLITS = 32


def choose_prefill_tile(problem: AttentionProblem, arch: str) -> PrefillTile:
    """The largest tile that keeps everything in registers and shared memory, by head size (64, 128 or 256) and matrix unit.

    128 rows wherever the accumulator leaves room for them: keys and values are then read once for 128 rows. Raises `TargetError`.
    """
    dim = _served_dim(problem, arch)
    quantised = problem.kv_format != "bf16"
    block_m, block_n, num_warps, num_stages = _PREFILL_TILES[arch][quantised][dim]
    return PrefillTile(
        block_m=block_m,
        block_n=block_n,
        convert_once=arch
        not in ("sm_90", "sm_100"),  # their matrix units read shared memory, where each item is converted once
        num_warps=num_warps,
        num_stages=num_stages,
    )


def choose_decode_tile(problem: AttentionProblem, arch: str, *, num_processors: int, max_seqs: int) -> DecodeTile:
    """Tiles of 16 KB of keys, and as many splits as give each of `num_processors` two programs for `max_seqs` sequences.

    A split has at least 256 keys, so windows limit the splits, and there are 32 at most. Raises `TargetError`.
    """
    dim = _served_dim(problem, arch)
    block_n = min((8192 if problem.kv_format == "bf16" else 16384) // dim, 128)
    # Half of it, and one more in flight, where the masks of padding or the conversion of int8 leave too few registers.
    halved = problem.head_dim < power_of_two(problem.head_dim) or (problem.kv_format == "int8" and dim == 256)
    block_n, num_stages = (block_n // 2, 4) if halved else (block_n, 3)
    if arch == "gfx942":
        block_n, num_stages = 64 if problem.kv_format == "bf16" and dim < 256 else 32, 1
    splits = -(-2 * num_processors // (max_seqs * problem.num_kv_heads))
    if problem.window:
        splits = min(splits, -(-problem.window // _SPLIT_KEYS))
    return DecodeTile(
        block_n=block_n,
        num_splits=min(splits, _MAX_SPLITS),
        min_tiles=_SPLIT_KEYS // block_n,
        num_warps=4,
        num_stages=num_stages,
    )


def _served_dim(problem: AttentionProblem, arch: str) -> int:
    """The head size in the tables above that holds this one."""
    if arch not in _PREFILL_TILES:
        raise TargetError(f"attention: no kernels for {arch}; there are for {', '.join(sorted(_PREFILL_TILES))}")
    if arch == "sm_80" and problem.kv_format == "fp8":
        raise TargetError("attention: sm_80 has no fp8; use a bf16 or int8 KV cache")
    padded = max(64, power_of_two(problem.head_dim))
    if padded > 256:
        raise TargetError(f"attention: head_dim={problem.head_dim} is more than 256")
    return padded


def power_of_two(value: int) -> int:
    """The smallest power of two that is at least `value`."""
    return 1 << max(value - 1, 0).bit_length()


def _record(problem: AttentionProblem) -> int:
    """float32 items of one partial result, a multiple of 4 so that each is aligned: sums, maximum and total a head."""
    return round_up(problem.group * (problem.head_dim + 2), 4)


def _settings(problem: AttentionProblem) -> dict[str, Setting]:
    item_bytes = 2 if problem.kv_format == "bf16" else 1
    softcap = problem.softcap
    return {
        "num_heads": problem.num_heads,
        "num_kv_heads": problem.num_kv_heads,
        "group": problem.group,
        "padded_group": power_of_two(problem.group),
        "head_dim": problem.head_dim,
        "padded_dim": max(_MIN_DOT, power_of_two(problem.head_dim)),
        "out_stride": round_up(problem.num_heads * problem.head_dim, _ROW_ALIGN),
        "kv_format": problem.kv_format,
        "quantised": problem.kv_format != "bf16",
        "fp8_type": problem.fp8_type.replace("fp8", "float8"),
        "block_items": problem.bytes_per_block // item_bytes,
        "items_per_64": 64 // item_bytes,
        "block_scales": problem.bytes_per_block // 4,
        "first_scale": 2 * problem.num_kv_heads * BLOCK_SIZE * problem.head_dim * item_bytes // 4,
        "window": problem.window,
        "softcap": softcap,
        "scale": (softcap or problem.scale) * _LOG2E,
        "tanh_scale": 2 * _LOG2E * problem.scale / softcap if softcap else None,
    }


def _name(problem: AttentionProblem) -> str:
    stored = problem.fp8_type if problem.kv_format == "fp8" else problem.kv_format
    parts = [stored, f"h{problem.num_heads}x{problem.num_kv_heads}", f"d{problem.head_dim}"]
    if problem.window:
        parts.append(f"win{problem.window}")
    if problem.softcap:
        parts.append(f"cap{_identifier(problem.softcap)}")
    if problem.scale != problem.head_dim**-0.5:
        parts.append(f"scale{_identifier(problem.scale)}")
    return "_".join([*parts, f"block{problem.bytes_per_block}"])


def _identifier(value: float) -> str:
    """A number as part of a name: 1e-06 -> 1em06, 0.25 -> 0p25."""
    return repr(float(value)).removesuffix(".0").replace(".", "p").replace("-", "m").replace("+", "")


def _pool(problem: AttentionProblem) -> dict[str, str]:
    scales = {} if problem.kv_format == "bf16" else {"kv_scales": "*fp32"}
    return {"kv_pool": f"*{problem.stored_type}", **scales}


def _parameters(types: Mapping[str, str]) -> tuple[Parameter, ...]:
    """Parameters in the order given; every kernel ends with the same three."""
    last = {"num_seqs": "i32", "max_blocks": "i32", "layer_offset": "i64"}
    return tuple(Parameter(name=name, type=type) for name, type in {**types, **last}.items())
