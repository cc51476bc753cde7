"""Packs matrices into the super-blocks of 256 that GGUF calls Q4_K, Q5_K and Q6_K, with a search for scales that lose least.

A super-block holds sub-blocks whose scales (and minimums) are small integers times one float16, so a choice for one sub-block is tied to
the others. The search has three steps: fit each sub-block alone by least squares from several starts (the idea of llama.cpp's k-quants),
round the fits to the common grid, then improve the float16 factors and the integers in turn, keeping what lowers the error.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...formats.floats import Array, row_slices

SUPER_BLOCK: Final = 256
K_QUANTS: Final = ("Q4_K", "Q5_K", "Q6_K")

_SLICE_VALUES: Final = 1 << 19
_TINY: Final = 1e-30
_LARGEST: Final = 65504.0  # of float16
_MAX_SCALE: Final = 63  # of the six-bit scales and minimums of Q4_K and Q5_K
_STEPS: Final = ((0, -1), (0, 1), (-1, 0), (1, 0), (-1, -1), (1, 1))


def quantize_k(w: Tensor | Array, type_name: str, importance: Tensor | None = None) -> npt.NDArray[np.uint8]:
    """`w [N, K]`, float32 with K a multiple of 256, as blocks: uint8 `[N, K / 256 * block bytes]`.

    `importance [K]` weighs the squared error of each column, usually with the mean square of its input; by default all weigh the same.
    """
    values = torch.from_numpy(np.ascontiguousarray(w, np.float32)) if isinstance(w, np.ndarray) else w.float()
    n, k = values.shape
    assert k % SUPER_BLOCK == 0, f"{k} columns are no multiple of {SUPER_BLOCK}"
    parts = []
    for rows in row_slices(n, k, _SLICE_VALUES):
        part = values[rows].contiguous()
        h = None if importance is None else importance.float().clamp_min(1e-12).expand_as(part)
        if type_name == "Q6_K":
            blocks = _pack_q6(part.view(-1, 16, 16), None if h is None else h.reshape(-1, 16, 16))
        else:
            bits = {"Q4_K": 4, "Q5_K": 5}[type_name]
            blocks = _pack_q45(part.view(-1, 8, 32), None if h is None else h.reshape(-1, 8, 32), bits)
        parts.append(blocks.reshape(part.shape[0], -1))
    return np.concatenate(parts)


def _pack_q45(x: Tensor, h: Tensor | None, bits: int) -> npt.NDArray[np.uint8]:
    """Super-blocks `x [B, 8, 32]` ~ d * sc * q - dmin * m, with six-bit sc and m, and q of `bits`."""
    high = (1 << bits) - 1
    scale, minimum = _fit_with_minimum(x, h, high)  # [B, 8], minimum >= 0 is subtracted
    d, dmin = _factor(scale), _factor(minimum)
    sc = _whole(scale, d)
    m = _whole(minimum, dmin)
    best = _codes_and_error(x, h, d * sc, dmin * m, high)
    for _ in range(2):
        # The factors that fit the codes best, by least squares over the whole super-block.
        new_d, new_dmin = _refit_factors(x, h, best[0], sc, m, d, dmin)
        fitted = _codes_and_error(x, h, new_d * sc, new_dmin * m, high)
        better = fitted[1].sum(1, keepdim=True) < best[1].sum(1, keepdim=True)  # [B, 1]
        d, dmin = torch.where(better, new_d, d), torch.where(better, new_dmin, dmin)
        best = _choose(better.expand_as(sc), fitted, best)
        for step_sc, step_m in _STEPS:
            near_sc, near_m = (sc + step_sc).clamp(0, _MAX_SCALE), (m + step_m).clamp(0, _MAX_SCALE)
            near = _codes_and_error(x, h, d * near_sc, dmin * near_m, high)
            better = near[1] < best[1]  # [B, 8]
            sc, m = torch.where(better, near_sc, sc), torch.where(better, near_m, m)
            best = _choose(better, near, best)
    return _q45_bytes(d, dmin, sc, m, best[0], bits)


def _fit_with_minimum(x: Tensor, h: Tensor | None, high: int) -> tuple[Tensor, Tensor]:
    """Scale and minimum of each sub-block of `x [B, S, W]`, each `[B, S]` and at least 0, for codes 0..high."""
    low = x.amin(-1).clamp_max(0)
    span = (x.amax(-1).clamp_min(0) - low).clamp_min(0)
    best_scale, best_minimum = span / high, -low
    best_error = torch.full_like(low, torch.inf)
    inverse_span = torch.where(span > _TINY, 1 / span.clamp_min(_TINY), 0)
    weights = torch.ones_like(x) if h is None else h
    total, mean_x = weights.sum(-1), (weights * x).sum(-1)
    square_x = (weights * x * x).sum(-1)
    for step in range(-10, 11):
        q = ((x - low[..., None]) * (inverse_span * (high + 0.1 * step))[..., None]).round_().clamp_(0, high)
        hq = q if h is None else h * q
        mean_q, square_q, product = hq.sum(-1), (hq * q).sum(-1), (hq * x).sum(-1)
        spread = total * square_q - mean_q.square()
        safe = spread.clamp_min(_TINY)
        scale = (total * product - mean_q * mean_x) / safe
        minimum = (mean_q * product - square_q * mean_x) / safe
        no_minimum = minimum < 0
        scale = torch.where(no_minimum, product / square_q.clamp_min(_TINY), scale)
        minimum = minimum.clamp_min(0)
        # |x - scale q + minimum|^2, from the sums
        error = (
            square_x
            + scale.square() * square_q
            + minimum.square() * total
            - 2 * scale * product
            + 2 * minimum * mean_x
            - 2 * scale * minimum * mean_q
        )
        better = (error < best_error) & (spread > _TINY) & (scale > 0)
        best_scale, best_minimum = torch.where(better, scale, best_scale), torch.where(better, minimum, best_minimum)
        best_error = torch.where(better, error, best_error)
    return best_scale, best_minimum


def _refit_factors(
    x: Tensor, h: Tensor | None, q: Tensor, sc: Tensor, m: Tensor, d: Tensor, dmin: Tensor
) -> tuple[Tensor, Tensor]:
    """The float16 factors `[B, 1]` of least squared error for given codes and integers; the old ones where these do not tell."""
    a, b = q * sc[..., None], -m[..., None].expand_as(q)  # x ~ d a + dmin b
    ha, hb = (a, b) if h is None else (h * a, h * b)
    aa, ab, bb = (ha * a).sum((1, 2)), (ha * b).sum((1, 2)), (hb * b).sum((1, 2))
    ax, bx = (ha * x).sum((1, 2)), (hb * x).sum((1, 2))
    determinant = aa * bb - ab.square()
    safe = determinant.clamp_min(_TINY)
    both = determinant > 1e-6 * aa * bb
    new_d = torch.where(both, (bb * ax - ab * bx) / safe, ax / aa.clamp_min(_TINY))
    new_dmin = torch.where(both, (aa * bx - ab * ax) / safe, dmin[:, 0])
    new_d = torch.where((aa > _TINY) & (new_d > 0), new_d, d[:, 0])
    new_dmin = torch.where(new_dmin > 0, new_dmin, dmin[:, 0])
    return _half(new_d)[:, None], _half(new_dmin)[:, None]


def _codes_and_error(x: Tensor, h: Tensor | None, scale: Tensor, minimum: Tensor, high: int) -> tuple[Tensor, Tensor]:
    """Nearest codes `[B, S, W]` and the squared error of each sub-block `[B, S]`."""
    inverse = torch.where(scale > _TINY, 1 / scale.clamp_min(_TINY), 0)
    shifted = x + minimum[..., None]
    q = (shifted * inverse[..., None]).round_().clamp_(0, high)
    loss = (shifted - q * scale[..., None]).square_()
    return q, (loss if h is None else loss.mul_(h)).sum(-1)


def _pack_q6(x: Tensor, h: Tensor | None) -> npt.NDArray[np.uint8]:
    """Super-blocks `x [B, 16, 16]` ~ d * sc * q, with int8 sc and q in -32..31."""
    scale = _fit_symmetric(x, h)  # [B, 16], of either sign
    largest = scale.gather(1, scale.abs().argmax(1, keepdim=True))
    d = _half(largest / -128)
    sc = _whole(scale, d, -128, 127)
    best = _signed_codes_and_error(x, h, d * sc)
    for _ in range(2):
        a = best[0] * sc[..., None]
        ha = a if h is None else h * a
        norm = (ha * a).sum((1, 2))
        new_d = torch.where(norm > _TINY, (ha * x).sum((1, 2)) / norm.clamp_min(_TINY), d[:, 0])
        new_d = _half(new_d)[:, None]
        fitted = _signed_codes_and_error(x, h, new_d * sc)
        better = fitted[1].sum(1, keepdim=True) < best[1].sum(1, keepdim=True)
        d = torch.where(better, new_d, d)
        best = _choose(better.expand_as(sc), fitted, best)
        for step in (-1, 1):
            near_sc = (sc + step).clamp(-128, 127)
            near = _signed_codes_and_error(x, h, d * near_sc)
            better = near[1] < best[1]
            sc = torch.where(better, near_sc, sc)
            best = _choose(better, near, best)
    return _q6_bytes(d, sc, best[0])


def _fit_symmetric(x: Tensor, h: Tensor | None) -> Tensor:
    """The scale of each sub-block for codes -32..31; it is signed so that the value of largest magnitude may be the code -32."""
    largest = x.gather(-1, x.abs().argmax(-1, keepdim=True))[..., 0]  # [B, S]
    best = largest / -32
    best_gain = torch.zeros_like(best)
    inverse = torch.where(largest.abs() > _TINY, -1 / largest, 0)
    for step in range(-9, 10):
        q = (x * (inverse * (32 + 0.1 * step))[..., None]).round_().clamp_(-32, 31)
        hq = q if h is None else h * q
        product, square = (hq * x).sum(-1), (hq * q).sum(-1).clamp_min(_TINY)
        gain = product.square() / square  # how much less the squared error is than that of all zeros
        better = gain > best_gain
        best, best_gain = torch.where(better, product / square, best), torch.where(better, gain, best_gain)
    return best


def _signed_codes_and_error(x: Tensor, h: Tensor | None, scale: Tensor) -> tuple[Tensor, Tensor]:
    inverse = torch.where(scale.abs() > _TINY, 1 / scale, 0)
    q = (x * inverse[..., None]).round_().clamp_(-32, 31)
    loss = (x - q * scale[..., None]).square_()
    return q, (loss if h is None else loss.mul_(h)).sum(-1)


def _choose(better: Tensor, new: tuple[Tensor, Tensor], old: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Codes and errors of the sub-blocks where `better [B, S]`."""
    return torch.where(better[..., None], new[0], old[0]), torch.where(better, new[1], old[1])


def _factor(scale: Tensor) -> Tensor:
    """The float16 factor `[B, 1]` by which the largest scale of a super-block is the integer 63."""
    return _half(scale.amax(1, keepdim=True) / _MAX_SCALE)


def _half(value: Tensor) -> Tensor:
    return value.clamp(-_LARGEST, _LARGEST).half().float()


def _whole(scale: Tensor, factor: Tensor, low: int = 0, high: int = _MAX_SCALE) -> Tensor:
    inverse = torch.where(factor.abs() > _TINY, 1 / factor, 0)
    return (scale * inverse).round_().clamp_(low, high)


def _q45_bytes(d: Tensor, dmin: Tensor, sc: Tensor, m: Tensor, q: Tensor, bits: int) -> npt.NDArray[np.uint8]:
    """`block_q4_K` and `block_q5_K` of ggml-common.h: d, dmin, 12 bytes of scales, [high bits,] low nibbles."""
    scales, mins, codes = (t.to(torch.uint8).numpy() for t in (sc, m, q))
    low = np.concatenate([scales[:, :4] | (scales[:, 4:] >> 4 << 6), mins[:, :4] | (mins[:, 4:] >> 4 << 6)], 1)
    packed = np.concatenate([low, (scales[:, 4:] & 15) | ((mins[:, 4:] & 15) << 4)], 1)  # [B, 12]
    pairs = codes.reshape(-1, 4, 2, 32)  # sub-blocks 2i and 2i + 1 share 32 bytes
    nibbles = ((pairs[:, :, 0] & 15) | ((pairs[:, :, 1] & 15) << 4)).reshape(-1, 128)
    parts = [_half_bytes(d), _half_bytes(dmin), packed]
    if bits == 5:  # bit s of byte i is the high bit of code i of sub-block s
        parts.append(np.packbits(codes >> 4, axis=1, bitorder="little")[:, 0])
    return np.concatenate([*parts, nibbles], 1)


def _q6_bytes(d: Tensor, sc: Tensor, q: Tensor) -> npt.NDArray[np.uint8]:
    """`block_q6_K` of ggml-common.h: low nibbles, high bit pairs, int8 scales, d."""
    codes = (q + 32).to(torch.uint8).numpy().reshape(-1, 2, 4, 32)  # two halves, four runs of 32
    low = (codes[:, :, :2] & 15) | ((codes[:, :, 2:] & 15) << 4)  # runs 0 and 2, 1 and 3 share a byte
    pairs = codes >> 4
    high = pairs[:, :, 0] | (pairs[:, :, 1] << 2) | (pairs[:, :, 2] << 4) | (pairs[:, :, 3] << 6)
    scales = sc.to(torch.int8).numpy().view(np.uint8)
    return np.concatenate([low.reshape(-1, 128), high.reshape(-1, 64), scales, _half_bytes(d)], 1)


def _half_bytes(value: Tensor) -> npt.NDArray[np.uint8]:
    """`[B, 1]` floats as the two bytes of their float16."""
    return np.ascontiguousarray(value.half().numpy()).view(np.uint8)
