"""What storing keys and values in a few bits makes of them: the reference that kernels and the eager graph share.

`f32` and `bf16` are what they say. Packed formats round each token's key or value of a head by itself:

* `fp8`: E4M3 numbers (largest 448) times a float32 scale of the head;
* `int8`: integers from -127 to 127, likewise;
* `int4`: integers from -8 to 7 times a bfloat16 scale of each 32 channels; the number of largest magnitude becomes -8.

A query of a packed layer reads block 0 (attention sinks, Xiao et al. 2023), the block it is in and the one before in bfloat16, and
all others as packed. That follows from positions alone, not from how a sequence was cut into steps.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

BLOCK_SIZE = 16  # tokens in a block of the paged KV pool
KV_FORMATS = ("f32", "bf16", "fp8", "int8", "int4")
_NEAR_BLOCKS = 2  # of a query: its own, and the one before
_INT4_GROUP = 32  # channels


def is_packed(format: str) -> bool:
    """Whether numbers of that format need a scale."""
    return format not in ("f32", "bf16")


def round_bf16(x: Tensor) -> Tensor:
    """To the nearest bfloat16, ties to even."""
    return x.to(torch.bfloat16).to(x.dtype)


def round_kv(x: Tensor, format: str) -> Tensor:
    """Keys or values `[..., D]` as attention reads them from a pool of `format`."""
    if format == "f32":
        return x
    if format == "bf16":
        return round_bf16(x)
    if format == "int4":
        return _round_int4(x)
    largest = 448.0 if format == "fp8" else 127.0
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-30) / largest
    numbers = (x / scale).to(torch.float8_e4m3fn).to(x.dtype) if format == "fp8" else torch.round(x / scale)
    return numbers * scale


def _round_int4(x: Tensor) -> Tensor:
    padding = -x.shape[-1] % _INT4_GROUP
    groups = functional.pad(x, (0, padding)).reshape(*x.shape[:-1], -1, _INT4_GROUP)  # [..., G, 32]
    extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    scale = round_bf16(extreme / -8)
    numbers = torch.round(groups / torch.where(scale == 0, 1.0, scale)).clamp(-8, 7)
    return round_bf16(numbers * scale).flatten(-2)[..., : x.shape[-1]]


def is_kept(query: Tensor, key: Tensor) -> Tensor:
    """Whether queries at positions `query [Q]` read keys at positions `key [K]` in 16 bit: bool `[Q, K]`."""
    distance = query[:, None] // BLOCK_SIZE - key[None] // BLOCK_SIZE
    return (key[None] < BLOCK_SIZE) | (distance < _NEAR_BLOCKS)


def hadamard(x: Tensor) -> Tensor:
    """The orthonormal Walsh-Hadamard transform of the last axis, in blocks of the largest power of two that divides it.

    Its own inverse; products of two transformed vectors are those of the vectors. It spreads outliers over all channels (QuaRot,
    Ashkboos et al. 2024).
    """
    width = x.shape[-1]
    block = width & -width
    out = x
    step = 1
    while step < block:
        pairs = out.reshape(*x.shape[:-1], -1, 2, step)  # [..., D / 2 step, 2, step]
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        out = torch.stack((first + second, first - second), -2).flatten(-3)
        step *= 2
    return out / math.sqrt(block)
