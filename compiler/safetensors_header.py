"""Reads the headers of safetensors files, and checks their arithmetic; no tensor is touched, and no library but Python's is needed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Final

from ..errors import CheckpointError

BYTES: Final = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"), 1),
}
_MAX_HEADER: Final = 100 << 20  # as the format says


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorHeader:
    """Type, shape and size of one stored tensor."""

    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


def read_header(path: Path) -> dict[str, TensorHeader]:
    """Name -> header. Raises `CheckpointError` for a file that is cut short or whose sizes contradict types and shapes."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(_MAX_HEADER, size - 8):
            raise CheckpointError(f"{path}: not a safetensors file of {size} bytes: its header would take {length}")
        data = file.read(length)
    try:
        entries = json.loads(data)
        headers = {name: _header(entry) for name, entry in entries.items() if name != "__metadata__"}
        end = max((entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"), default=0)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError):
        raise CheckpointError(f"{path}: damaged safetensors header; download the file again") from None
    if 8 + length + end != size:
        raise CheckpointError(f"{path}: {size} bytes, expected {8 + length + end}; download the file again")
    for name, header in headers.items():
        expected = prod(header.shape) * BYTES.get(header.dtype, 0)
        if header.dtype in BYTES and header.num_bytes != expected:
            raise CheckpointError(
                f"{path}: {name} is {header.dtype}{list(header.shape)} in {header.num_bytes} bytes, expected {expected}"
            )
    return headers


def _header(entry: dict[str, object]) -> TensorHeader:
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not isinstance(shape, list) or not isinstance(offsets, list):
        raise TypeError("shape and data_offsets are lists")
    return TensorHeader(
        dtype=str(entry["dtype"]), shape=tuple(int(size) for size in shape), num_bytes=int(offsets[1]) - int(offsets[0])
    )
