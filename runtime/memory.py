"""Allocates the arena and the KV pool, and finds out how much memory and how many CPUs this process may use."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np

from ..errors import CapacityError

_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


def allocate(num_bytes: int, what: str) -> mmap.mmap:
    """`num_bytes` of zeroed, page-aligned memory that only costs what is touched; raises CapacityError."""
    try:
        return mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    except (OSError, ValueError, OverflowError) as error:
        raise CapacityError(f"cannot allocate {num_bytes} bytes for the {what}: {error}") from None


def address_of(memory: mmap.mmap) -> int:
    """Where a mapping begins; the caller keeps it open."""
    # The array is gone after this line, so that it does not keep the mapping from being closed.
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def trim_heap() -> None:
    """Give freed memory back to the system, where the C library can: worth it after parsing something large."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def available_bytes() -> int:
    """Memory that can be allocated now without swapping, within the limit of the container; 0 if unknown."""
    amounts = []
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            amounts.append(int(line.split()[1]) * 1024)
    limit, used = _read("/sys/fs/cgroup/memory.max").strip(), _read("/sys/fs/cgroup/memory.current").strip()
    if limit.isdigit() and used.isdigit():
        amounts.append(max(int(limit) - int(used), 0))
    return min(amounts, default=0)


def available_cpus() -> int:
    """CPUs this process may use: its affinity mask, cut to the CPU quota of the container."""
    affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    quota = _read("/sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and all(part.isdigit() for part in quota) and int(quota[1]):
        return max(1, min(len(affinity), int(quota[0]) // int(quota[1])))
    return max(1, len(affinity))


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
