"""Parses a GGUF container over a memory map with every length checked, so a hostile file costs one error.

The reader of the `gguf` package builds two numpy views for each vocabulary entry (seconds for a 262k vocabulary) and
trusts the lengths it reads; this one needs a fraction of a second. Format: ggml/docs/gguf.md, versions 2 and 3.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from ...errors import CheckpointError, UnsupportedModelError

Metadata = dict[str, "bool | int | float | str | list[str] | np.ndarray"]

SUPPORTED_TYPES = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
)
_MAX_DIMS = 4
_STRING, _ARRAY = 8, 9
_SCALARS: dict[int, str] = {  # GGUF value type -> struct and numpy format
    **dict(zip(range(8), ("<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "<u1"), strict=True)),
    **dict(zip(range(10, 13), ("<u8", "<i8", "<f8"), strict=True)),
}
_BOOL = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """Where one tensor lies: `shape` is row-major (HF order, not ggml's), `offset` counts from the file's start."""

    name: str
    type_name: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class GgufReader:
    """`metadata` by key, `tensors` by GGUF name, and `data` to see one tensor's bytes without copying."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise CheckpointError(f"{path}: cannot be read as a GGUF file ({error})") from error
        self._size = len(self._map)
        self._at = 0
        if self._size < 24 or self._map[:4] != b"GGUF":
            raise CheckpointError(f"{path}: not a GGUF file (it starts with {self._map[:4]!r}, expected b'GGUF')")
        self._at = 4
        version = self._integer("<I")
        if version not in (2, 3):
            kind = "big-endian" if version & 0xFFFF == 0 else f"GGUF version {version}"
            raise UnsupportedModelError(f"{path}: {kind} is not supported; supported: little-endian versions 2 and 3")
        tensor_count, pair_count = self._integer("<Q"), self._integer("<Q")
        self.metadata: Metadata = {}
        for _ in range(self._plausible(pair_count, 13, "metadata pairs")):
            key = self._string()
            if key in self.metadata:
                raise self._damaged(f"metadata key {key!r} appears twice")
            self.metadata[key] = self._value(self._integer("<I"), key)
        self.tensors = self._tensor_table(self._plausible(tensor_count, 32, "tensors"))

    def data(self, tensor: GgufTensor) -> np.ndarray:
        """The tensor's bytes, uint8[nbytes], a read-only view of the map."""
        return np.frombuffer(self._map, dtype=np.uint8, count=tensor.nbytes, offset=tensor.offset)

    def blocks(self, tensor: GgufTensor) -> np.ndarray:
        """The tensor's bytes by block of its type, uint8[blocks, bytes of one], likewise a view."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        return self.data(tensor).reshape(-1, GGML_QUANT_SIZES[GGMLQuantizationType[tensor.type_name]][1])

    def _tensor_table(self, count: int) -> dict[str, GgufTensor]:
        entries = []
        for _ in range(count):
            name, n_dims = self._string(), self._integer("<I")
            if n_dims > _MAX_DIMS:
                raise self._damaged(f"tensor {name!r} has {n_dims} dimensions, expected at most {_MAX_DIMS}")
            dims = [self._integer("<Q") for _ in range(n_dims)]
            entries.append((name, tuple(reversed(dims)), self._integer("<I"), self._integer("<Q")))
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._damaged(f"general.alignment is {alignment!r}, expected a power of two")
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, type_id, offset in entries:
            if name in tensors:
                raise self._damaged(f"tensor {name!r} appears twice")
            type_name, nbytes = self._stored_bytes(name, shape, type_id)
            if offset % alignment or start + offset + nbytes > self._size:
                raise self._damaged(
                    f"tensor {name!r} should lie at bytes {start + offset} to {start + offset + nbytes} "
                    f"of a file of {self._size}, aligned to {alignment}"
                )
            tensors[name] = GgufTensor(name=name, type_name=type_name, shape=shape, offset=start + offset, nbytes=nbytes)
        return tensors

    def _stored_bytes(self, name: str, shape: tuple[int, ...], type_id: int) -> tuple[str, int]:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            kind = GGMLQuantizationType(type_id)
        except ValueError:
            kind = None
        type_name = kind.name if kind is not None else f"type {type_id}"
        if kind is None or type_name not in SUPPORTED_TYPES:
            raise UnsupportedModelError(
                f"{self.path}: tensor {name!r} is stored as {type_name}; supported: {', '.join(SUPPORTED_TYPES)}"
            )
        if not shape or min(shape) < 1 or prod(shape) >= 1 << 48:
            raise self._damaged(f"tensor {name!r} has shape {list(shape)}")
        block_elements, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block_elements:
            raise self._damaged(
                f"tensor {name!r} has rows of {shape[-1]}, not a multiple of {type_name}'s block of {block_elements}"
            )
        return type_name, prod(shape) // block_elements * block_bytes

    def _value(self, kind: int, key: str) -> bool | int | float | str | list[str] | np.ndarray:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            kind, count = self._integer("<I"), self._integer("<Q")
            if kind == _STRING:
                return [self._string() for _ in range(self._plausible(count, 8, f"strings in {key!r}"))]
            if kind not in _SCALARS:
                raise self._damaged(f"metadata {key!r} is an array of type {kind}, which is not a scalar or a string")
            return self._array(kind, count)
        if kind not in _SCALARS:
            raise self._damaged(f"metadata {key!r} has unknown type {kind}")
        item: bool | int | float = self._array(kind, 1)[0].item()
        return item

    def _array(self, kind: int, count: int) -> np.ndarray:
        dtype = np.dtype(_SCALARS[kind])
        at = self._advance(count * dtype.itemsize)
        array = np.frombuffer(self._map, dtype=dtype, count=count, offset=at)
        return array.astype(np.bool_) if kind == _BOOL else array

    def _integer(self, form: str) -> int:
        value: int = struct.unpack_from(form, self._map, self._advance(struct.calcsize(form)))[0]
        return value

    def _string(self) -> str:
        length = self._integer("<Q")
        at = self._advance(length)
        try:
            return self._map[at : at + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._damaged(f"the string at byte {at} is not UTF-8") from error

    def _advance(self, count: int) -> int:
        at, self._at = self._at, self._at + count
        if self._at > self._size:
            raise self._damaged(f"it needs {count} bytes at byte {at}, but the file ends at {self._size}")
        return at

    def _plausible(self, count: int, smallest: int, what: str) -> int:
        if count * smallest > self._size - self._at:
            raise self._damaged(f"it announces {count} {what}, more than its {self._size} bytes can hold")
        return count

    def _damaged(self, detail: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: damaged GGUF file: {detail}; download it again")
