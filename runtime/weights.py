"""Maps safetensors files and finds a program's weights in them, after checking every figure in their headers."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ..errors import BundleError
from .program import WeightSpec

ALIGNMENT = 64
MAX_HEADER_BYTES = 100_000_000

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip


def tensor_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Size of a tensor; `dtype` is one of `ITEM_BYTES`."""
    return math.prod(shape) * ITEM_BYTES[dtype]


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor of a safetensors header; `data_offsets` count from the end of the header."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class WeightFile:
    """The tensors of a mapped file. The mapping stays open as long as this object or an array from it lives."""

    def __init__(self, data: bytes | mmap.mmap, where: Path) -> None:
        """Check the header of `data`, the whole file; raises BundleError."""
        self.where = where
        self.data_start, self.entries, self.metadata = _parse_header(data, where)
        self._bytes = np.frombuffer(data, dtype=np.uint8)

    @property
    def address(self) -> int:
        """Where the file begins in memory, header included."""
        return int(self._bytes.ctypes.data)

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return len(self._bytes)

    def offset(self, spec: WeightSpec) -> int:
        """Where in the file a tensor begins; raises BundleError if it is not the one of `spec`."""
        entry = self.entries[spec.name]
        if (entry.dtype, entry.shape) != (spec.dtype, spec.shape):
            raise BundleError(
                f"{self.where}: weight {spec.name!r} is {entry.dtype} {entry.shape}, but program.json says "
                f"{spec.dtype} {spec.shape}"
            )
        offset = self.data_start + entry.data_offsets[0]
        if (self.address + offset) % ALIGNMENT:
            raise BundleError(f"{self.where}: weight {spec.name!r} does not start on a {ALIGNMENT}-byte boundary")
        return offset

    def array(self, name: str, dtype: str) -> npt.NDArray[Any]:
        """A one-dimensional tensor of unsigned integers, in place; raises BundleError if it is anything else."""
        entry = self.entries.get(name)
        if entry is None or entry.dtype != dtype or len(entry.shape) != 1:
            raise BundleError(f"{self.where}: expected a one-dimensional {dtype} tensor {name!r}; compile again")
        start, stop = (self.data_start + offset for offset in entry.data_offsets)
        return self._bytes[start:stop].view(f"<u{ITEM_BYTES[dtype]}")


def find_weights(files: Sequence[WeightFile], specs: Sequence[WeightSpec]) -> list[tuple[int, int]]:
    """`(index of the file, offset in it)` of each weight, which must be exactly the tensors of all the files.

    Raises BundleError.
    """
    where = " and ".join(str(file.where) for file in files)
    owner: dict[str, int] = {}
    for index, file in enumerate(files):
        for name in file.entries:
            if name in owner:
                raise BundleError(
                    f"{file.where}: weight {name!r} is in {files[owner[name]].where}, too; compile the bundle again"
                )
            owner[name] = index
    missing = [spec.name for spec in specs if spec.name not in owner]
    if missing:
        raise BundleError(f"{where}: {len(missing)} weights of program.json are absent, first {missing[0]!r}")
    extra = sorted(set(owner) - {spec.name for spec in specs})
    if extra:
        raise BundleError(f"{where}: {len(extra)} weights are not in program.json, first {extra[0]!r}")
    return [(owner[spec.name], files[owner[spec.name]].offset(spec)) for spec in specs]


def _parse_header(data: bytes | mmap.mmap, where: Path) -> tuple[int, dict[str, TensorEntry], dict[str, str]]:
    if len(data) < 8:
        raise BundleError(f"{where}: {len(data)} bytes is too short for a safetensors file")
    length = int.from_bytes(data[:8], "little")
    if length > min(len(data) - 8, MAX_HEADER_BYTES):
        raise BundleError(f"{where}: the header claims {length} bytes, but the file has {len(data) - 8} after its length")
    try:
        raw = msgspec.json.decode(data[8 : 8 + length], type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(raw.pop("__metadata__", b"{}"), type=dict[str, str])
        entries = {name: msgspec.json.decode(value, type=TensorEntry) for name, value in raw.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BundleError(f"{where}: the safetensors header is damaged: {error}") from None
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        if entry.dtype not in ITEM_BYTES:
            raise BundleError(f"{where}: weight {name!r} has dtype {entry.dtype!r}; known are {', '.join(ITEM_BYTES)}")
        size = tensor_bytes(entry.dtype, entry.shape)
        start, stop = entry.data_offsets
        if any(dimension < 0 for dimension in entry.shape) or start != end or stop - start != size:
            raise BundleError(
                f"{where}: weight {name!r} {entry.dtype} {entry.shape} lies at bytes {start} to {stop}; expected "
                f"{end} to {end + size}: the header is damaged"
            )
        end = stop
    found = len(data) - 8 - length
    if end != found:
        raise BundleError(f"{where}: the weights end at byte {end} of the data, but the file holds {found}")
    return 8 + length, entries, metadata
