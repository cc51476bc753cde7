"""Rounds float32 to the floating-point formats numpy lacks: bfloat16, as `uint16` bits, and fp8, as `uint8` bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
Float32: TypeAlias = npt.NDArray[np.float32]

_SLICE_VALUES: Final = 1 << 18


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple that is at least `value`."""
    return -(-value // multiple) * multiple


def row_slices(n: int, k: int, values: int = _SLICE_VALUES) -> Iterator[slice]:
    """Slices of the rows of `[n, k]` of about so many values each, which fit a cache."""
    rows = max(1, values // max(k, 1))
    return (slice(start, min(start + rows, n)) for start in range(0, n, rows))


def to_bf16(x: npt.ArrayLike) -> npt.NDArray[np.uint16]:
    """float32 to bfloat16 bits, to nearest even; NaN stays NaN."""
    values = np.ascontiguousarray(x, dtype=np.float32)
    out = np.empty(values.shape, np.uint16)
    source, target = values.reshape(-1), out.reshape(-1)
    for start in range(0, source.size, _SLICE_VALUES):
        part = source[start : start + _SLICE_VALUES]
        bits = part.view(np.uint32)
        rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
        nan = np.isnan(part)
        if nan.any():
            rounded[nan] = bits[nan] | np.uint32(0x400000)
        target[start : start + _SLICE_VALUES] = rounded >> np.uint32(16)
    return out


def from_bf16(bits: npt.ArrayLike) -> Float32:
    """bfloat16 bits to float32."""
    wide: Float32 = (np.asarray(bits, dtype=np.uint32) << np.uint32(16)).view(np.float32)
    return wide


def quantize_fp8(w: Array, *, fnuz: bool) -> tuple[npt.NDArray[np.uint8], Float32]:
    """E4M3 bits with one scale for each row: `w[n, k] ~ e4m3(bits[n, k]) * scale[n]` (Micikevicius et al. 2022).

    `fnuz` is the variant without infinities and negative zero that AMD's CDNA 3 computes with; its largest value is 240, not 448.
    """
    import torch  # numpy has no 8-bit floats

    dtype, largest = (torch.float8_e4m3fnuz, 240.0) if fnuz else (torch.float8_e4m3fn, 448.0)
    n, k = w.shape
    bits = np.empty((n, k), np.uint8)
    scale = np.empty(n, np.float32)
    for rows in row_slices(n, k):
        part = np.asarray(w[rows], np.float32)
        scale[rows] = np.maximum(np.abs(part).max(axis=1), np.float32(1e-30)) / np.float32(largest)
        scaled = np.clip(part / scale[rows][:, None], -largest, largest)
        bits[rows] = torch.from_numpy(scaled).to(dtype).view(torch.uint8).numpy()
    return bits, scale


def from_fp8(bits: npt.NDArray[np.uint8], *, fnuz: bool) -> Float32:
    """E4M3 bits to float32."""
    import torch

    dtype = torch.float8_e4m3fnuz if fnuz else torch.float8_e4m3fn
    values: Float32 = torch.from_numpy(np.ascontiguousarray(bits)).view(dtype).to(torch.float32).numpy()
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Matrix:
    """A matrix `[N, K]` in E4M3 with a float32 scale a row: `e4m3(bits[n, k]) * scale[n]`.

    `bits` is uint8 `[N, K]` of the variant with NaN and without infinities (largest value 448), `scale` float32 `[N]`.
    """

    bits: npt.NDArray[np.uint8]
    scale: Float32

    def __post_init__(self) -> None:
        if self.scale.shape != self.bits.shape[:1] or self.scale.dtype != np.float32 or self.bits.dtype != np.uint8:
            raise ValueError(
                f"fp8: scale {self.scale.shape} {self.scale.dtype} does not fit {self.bits.shape} {self.bits.dtype}"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """`(N, K)`."""
        n, k = self.bits.shape
        return n, k

    def dequantize(self) -> Float32:
        """The float32 values `[N, K]`."""
        out = np.empty(self.shape, np.float32)
        for rows in row_slices(*self.shape):
            out[rows] = from_fp8(self.bits[rows], fnuz=False) * self.scale[rows, None]
        return out
