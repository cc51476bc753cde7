"""The `llmc::*` operators that passes lower aten subgraphs to, each with a plain torch reference and a fake.

Shapes: a traced graph has batch 1, so activations are `[1, T, width]` and heads `[1, T, H, D]`. Every operator but attention works token
by token, which is why the same graph is the flattened batch of many sequences. All activations are float32 in eager execution.

`format` names how a matrix is stored and how its input rows are rounded before the product:

* `f32`, `bf16`: both the same;
* `f16`: inputs in f32 (CPU);
* `int8`, `int<bits>-g<group>`, `int<bits>-g<group>-asym`: integers, inputs rounded to 16 bits of each row's range (CPU);
* `fp8`, `fp8-fnuz`, `w8a8`: E4M3 or int8 weights with a scale for each row, inputs likewise (GPU), or, with `-static<step>`, in such steps;
* `w4a16-g<group>`: int4 weights, bf16 inputs (GPU).

In eager execution the weight argument already holds the decoded values; only the rounding of the input is applied here.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from ..formats.static_step import LARGEST, split_step
from . import kv_formats

llmc = torch.ops.llmc  # the namespace the operators below are called through
BLOCK_SIZE = kv_formats.BLOCK_SIZE

ACTIVATIONS = {
    "silu": functional.silu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu": functional.gelu,
}


_FP8 = {"fp8": torch.float8_e4m3fn, "fp8-fnuz": torch.float8_e4m3fnuz}


def round_rows(x: Tensor, format: str) -> Tensor:
    """What packing does to the numbers: bf16 rounds to nearest even; the others keep some bits of each row's range."""
    if format == "bf16" or format.startswith("w4a16"):
        return x.to(torch.bfloat16).to(x.dtype)
    kind, static = split_step(format)
    if kind in LARGEST:
        largest = LARGEST[kind]
        step = x.abs().amax(-1, keepdim=True).clamp_min(1e-30) / largest if static is None else static
        scaled = (x / step).clamp(-largest, largest)
        return (scaled.to(_FP8[kind]).to(x.dtype) if kind in _FP8 else torch.round(scaled)) * step
    if format.startswith("int"):
        step = x.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 32512
        return torch.round(x / step) * step
    return x


@torch.library.custom_op("llmc::embedding", mutates_args=())
def embedding(weight: Tensor, token_ids: Tensor, scale: float, format: str = "f32") -> Tensor:
    """Rows of `weight [V, H]` for `token_ids [1, T]`, times `scale`."""
    return functional.embedding(token_ids, weight) * scale


@embedding.register_fake
def _(weight: Tensor, token_ids: Tensor, *_: object) -> Tensor:
    return weight.new_empty(*token_ids.shape, weight.shape[1])


@torch.library.custom_op("llmc::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float, pack: str = "") -> Tensor:
    """Root-mean-square norm over the last axis times `(weight + offset)` (Zhang and Sennrich 2019); Gemma's offset is 1.

    With `pack`, the output is packed as the input of a linear of that format.
    """
    out = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (weight + offset)
    return round_rows(out, pack)


@rms_norm.register_fake
def _(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("llmc::add_rms_norm", mutates_args=())
def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    post_weight: Tensor | None = None,
    post_eps: float = 0.0,
    pack: str = "",
) -> tuple[Tensor, Tensor]:
    """`sum = residual + x` and its RMS norm; with `post_weight`, `x` is normalised first (Gemma's post-norms).

    Returns `(norm, sum)`, both of the shape of `x`; executors update the residual in place.
    """
    if post_weight is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + post_eps) * (post_weight + offset)
    total = residual + x
    out = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps) * (weight + offset)
    return round_rows(out, pack), total


@add_rms_norm.register_fake
def _(x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


@torch.library.custom_op("llmc::pack_rows", mutates_args=())
def pack_rows(x: Tensor, format: str) -> Tensor:
    """The rows of `x` in the input format of a linear of `format`; the same shape, rounded."""
    return round_rows(x, format).clone()


@pack_rows.register_fake
def _(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("llmc::linear", mutates_args=())
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, format: str = "f32") -> Tensor:
    """`x [1, T, K]` times `weight [N, K]` transposed, plus `bias [N]`."""
    return functional.linear(round_rows(x, format), weight, bias)


@linear.register_fake
def _(x: Tensor, weight: Tensor, *_: object) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@torch.library.custom_op("llmc::glu", mutates_args=())
def glu(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """`activation(gate) * up` (Shazeer 2020); activation is `silu`, `gelu_tanh` or `gelu`."""
    return ACTIVATIONS[activation](gate) * up


@glu.register_fake
def _(gate: Tensor, *_: object) -> Tensor:
    return torch.empty_like(gate)


@torch.library.custom_op("llmc::linear_glu", mutates_args=())
def linear_glu(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, format: str = "f32") -> Tensor:
    """One product with `weight [2*I, K]` (gate rows, then up rows) and `activation(gate) * up`: `[1, T, I]`."""
    gate, up = functional.linear(round_rows(x, format), weight, bias).chunk(2, -1)
    return ACTIVATIONS[activation](gate) * up


@linear_glu.register_fake
def _(x: Tensor, weight: Tensor, *_: object) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0] // 2)


@torch.library.custom_op("llmc::linear_residual", mutates_args=())
def linear_residual(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, format: str = "f32") -> Tensor:
    """`residual [1, T, N]` plus a linear of `x [1, T, K]`; executors update the residual in place."""
    return residual + functional.linear(round_rows(x, format), weight, bias)


@linear_residual.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, *_: object) -> Tensor:
    return torch.empty_like(residual)


@torch.library.custom_op("llmc::rope", mutates_args=())
def rope(x: Tensor, positions: Tensor, inv_freq: Tensor, scaling: float) -> Tensor:
    """Rotary position embedding (Su et al. 2021) on `x [1, T, H, D]`; `positions [1, T]`, `inv_freq [R/2]`.

    Channels `i` and `i + R/2` of the first R are a pair (NeoX order), channels from R on pass through; cos and sin are
    multiplied by `scaling`.
    """
    rotary = 2 * inv_freq.shape[0]
    angle = positions.to(torch.float32)[..., None, None] * inv_freq  # [1, T, 1, R/2]
    cos, sin = angle.cos() * scaling, angle.sin() * scaling
    first, second, rest = x[..., : rotary // 2], x[..., rotary // 2 : rotary], x[..., rotary:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


@rope.register_fake
def _(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("llmc::attention", mutates_args=())
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int,
    softcap: float,
    layer: int,
    kv_format: str = "f32",
    rotate_keys: bool = False,
) -> Tensor:
    """Causal attention of one whole sequence: `q [1, Hq, T, D]`, `k` and `v [1, Hkv, T, D]` -> `[1, T, Hq, D]`.

    `window` 0 is full attention; otherwise a token sees the last `window` tokens, itself included. `softcap` 0 is off. Keys and values are
    read as a pool of `kv_format` gives them back (`kv_formats.py`); with `rotate_keys`, queries and keys go through
    `kv_formats.hadamard` first.
    """
    if rotate_keys:
        q, k = kv_formats.hadamard(q), kv_formats.hadamard(k)
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))  # [T, H, D]
    return _attend(q, k, v, torch.arange(len(q)), scale, window, softcap, kv_format)[None].contiguous()


@attention.register_fake
def _(q: Tensor, *_: object) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], q.shape[3])


def _causal_softmax(scores: Tensor, query: Tensor, key: Tensor, window: int, softcap: float) -> Tensor:
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    hidden = key[None, :] > query[:, None]
    if window:
        hidden = hidden | (key[None, :] <= query[:, None] - window)
    return scores.masked_fill(hidden, float("-inf")).softmax(-1)


@torch.library.custom_op("llmc::paged_attention", mutates_args={"kv_pool"})
def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_pool: Tensor,
    positions: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    block_table: Tensor,
    scale: float,
    window: int,
    softcap: float,
    layer: int,
    split_kv: bool = False,
) -> Tensor:
    """Writes the T new keys and values to the paged pool, then attends over each sequence's blocks.

    `q [1, T, Hq, D]`, `k` and `v [1, T, Hkv, D]`, `kv_pool [blocks, layers, 2, 16, Hkv, D]` (this reference's layout; executors have
    their own), `query_start [B+1]`, `context_len [B]`, `block_table [B, max_blocks]`; returns `[1, T, Hq*D]`. `split_kv` asks
    executors to divide the keys, not the queries, among their threads.
    """
    step = (positions, query_start, context_len, block_table)
    return _attend_paged(q, k, v, kv_pool, *step, scale, window, softcap, layer, "f32")


def _attend_paged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_pool: Tensor,
    positions: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    block_table: Tensor,
    scale: float,
    window: int,
    softcap: float,
    layer: int,
    kv_format: str,
) -> Tensor:
    """The pool holds exact keys and values here; `kv_format` is applied when they are read."""
    out = torch.empty_like(q)
    for sequence in range(len(context_len)):
        new = slice(int(query_start[sequence]), int(query_start[sequence + 1]))
        position = positions[0, new]
        block = block_table[sequence, position // BLOCK_SIZE]
        kv_pool[block, layer, 0, position % BLOCK_SIZE] = k[0, new]
        kv_pool[block, layer, 1, position % BLOCK_SIZE] = v[0, new]
        length = int(context_len[sequence])
        blocks = block_table[sequence, : -(-length // BLOCK_SIZE)]
        keys, values = kv_pool[blocks, layer].transpose(0, 1).flatten(1, 2)[:, :length]  # [length, Hkv, D]
        out[0, new] = _attend(q[0, new], keys, values, position, scale, window, softcap, kv_format)
    return out.flatten(2)


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, position: Tensor, scale: float, window: int, softcap: float, kv_format: str
) -> Tensor:
    """Queries `q [Q, Hq, D]` at `position [Q]` over a sequence's `keys` and `values [K, Hkv, D]` from position 0 on: `[Q, Hq, D]`."""
    groups = q.shape[1] // keys.shape[1]
    if kv_format != "f32":
        q = kv_formats.round_bf16(q)  # executors multiply it with bfloat16 keys
    stored_keys, stored_values = (kv_formats.round_kv(x, kv_format).repeat_interleave(groups, 1) for x in (keys, values))
    where = torch.arange(len(keys))
    scores = torch.einsum("qhd,khd->hqk", q, stored_keys)
    if not kv_formats.is_packed(kv_format):
        probabilities = _causal_softmax(scores * scale, position, where, window, softcap)
        return torch.einsum("hqk,khd->qhd", probabilities, stored_values)
    keys, values = (kv_formats.round_bf16(x).repeat_interleave(groups, 1) for x in (keys, values))
    kept = kv_formats.is_kept(position, where)
    scores = torch.where(kept, torch.einsum("qhd,khd->hqk", q, keys), scores)
    probabilities = _causal_softmax(scores * scale, position, where, window, softcap)
    packed = torch.einsum("hqk,khd->qhd", probabilities * ~kept, stored_values)
    return packed + torch.einsum("hqk,khd->qhd", probabilities * kept, values)


@paged_attention.register_fake
def _(q: Tensor, *_: object) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], q.shape[2] * q.shape[3])


@torch.library.custom_op("llmc::rope_paged_attention", mutates_args={"kv_pool"})
def rope_paged_attention(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    norm_eps: float,
    norm_offset: float,
    inv_freq: Tensor,
    rope_scaling: float,
    kv_pool: Tensor,
    positions: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    block_table: Tensor,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    window: int,
    softcap: float,
    layer: int,
    kv_format: str = "f32",
    rotate_keys: bool = False,
    split_kv: bool = False,
) -> Tensor:
    """`paged_attention` with everything between it and the fused projection: head split, q and k norms, rotary.

    `qkv [1, T, (Hq + 2*Hkv) * D]` in that order; returns `[1, T, Hq*D]`. Keys and values are read as a pool of `kv_format` gives them
    back (`kv_formats.py`); with `rotate_keys`, queries and keys go through `kv_formats.hadamard` first.
    """
    heads = qkv.view(*qkv.shape[:2], num_heads + 2 * num_kv_heads, -1)
    q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], 2)
    if q_norm is not None:
        q = rms_norm(q, q_norm, norm_eps, norm_offset)
    if k_norm is not None:
        k = rms_norm(k, k_norm, norm_eps, norm_offset)
    q, k = rope(q, positions, inv_freq, rope_scaling), rope(k, positions, inv_freq, rope_scaling)
    if rotate_keys:
        q, k = kv_formats.hadamard(q), kv_formats.hadamard(k)
    step = (positions, query_start, context_len, block_table)
    return _attend_paged(q, k, v, kv_pool, *step, scale, window, softcap, layer, kv_format)


@rope_paged_attention.register_fake
def _(qkv: Tensor, *rest: object) -> Tensor:
    num_heads, num_kv_heads = cast("tuple[int, int]", rest[11:13])
    return qkv.new_empty(*qkv.shape[:2], qkv.shape[2] // (num_heads + 2 * num_kv_heads) * num_heads)


@torch.library.custom_op("llmc::gather_rows", mutates_args=())
def gather_rows(x: Tensor, rows: Tensor) -> Tensor:
    """The tokens `rows [R]` of `x [1, T, H]`: `[1, R, H]`."""
    return x[:, rows]


@gather_rows.register_fake
def _(x: Tensor, rows: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], rows.shape[0], x.shape[2])


NORMS = (
    llmc.rms_norm.default,
    llmc.add_rms_norm.default,
)  # the last argument is the format of the linears that read the output
LINEARS = (llmc.linear.default, llmc.linear_glu.default, llmc.linear_residual.default)  # input, weight, ..., format
