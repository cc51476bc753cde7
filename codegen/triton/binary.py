"""Reads what was really built out of a cubin or hsaco: architecture, registers, spills, matrix instructions."""

from __future__ import annotations

import io
import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile

from ...errors import ToolchainError

_AMD_MACHINES = {0x4C: "gfx942", 0x4F: "gfx950", 0x41: "gfx1100"}  # EF_AMDGPU_MACH of the LLVM AMDGPU guide
_MATRIX = re.compile(r"\b(?:[HQI]?GMMA|[HQI]MMA|UTC[A-Z]*MMA)\b|v_mfma_\w+")
_LOCAL = re.compile(r"\b(?:STL|LDL)\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class BinaryFacts:
    """`spill_bytes` is the stack that a thread needs; `matrix_instructions` counts them by mnemonic."""

    arch: str
    registers: int
    spill_bytes: int
    matrix_instructions: dict[str, int]


def read_binary(data: bytes, name: str, assembly: str) -> BinaryFacts:
    """The facts of kernel `name` in an ELF file; `assembly` is the compiler's text, used for AMD alone.

    Raises `ToolchainError` for a file that is no such ELF.
    """
    try:
        elf = ELFFile(io.BytesIO(data))
        if elf["e_machine"] == "EM_CUDA":
            return _nvidia(data, elf, name)
        if elf["e_machine"] == "EM_AMDGPU":
            return _amd(elf, name, assembly)
    except (ELFError, KeyError, msgspec.MsgspecError) as error:
        raise ToolchainError(f"{name}: the compiler's output is not a kernel binary: {error}") from None
    raise ToolchainError(f"{name}: the compiler's output is for machine {elf['e_machine']}, expected CUDA or AMDGPU")


def _nvidia(data: bytes, elf: Any, name: str) -> BinaryFacts:
    flags = elf["e_flags"]
    number = flags >> 8 & 0xFF if elf["e_ident"]["EI_ABIVERSION"] >= 8 else flags & 0xFF
    usage = _cuobjdump(data, "-res-usage")
    found = re.search(rf"Function {re.escape(name)}:\s*REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    if found is None:
        raise ToolchainError(f"{name}: the cubin has no function of that name; cuobjdump says {' '.join(usage.split())[:200]}")
    sass = _cuobjdump(data, "-sass")
    registers, stack, _, local = (int(group) for group in found.groups())
    spilled = max(stack, local, 4 * len(_LOCAL.findall(sass)))
    return BinaryFacts(
        arch=f"sm_{number}", registers=registers, spill_bytes=spilled, matrix_instructions=dict(Counter(_MATRIX.findall(sass)))
    )


def _amd(elf: Any, name: str, assembly: str) -> BinaryFacts:
    arch = _AMD_MACHINES.get(elf["e_flags"] & 0xFF, f"machine {elf['e_flags'] & 0xFF:#x}")
    notes = [note for section in elf.iter_sections() if section["sh_type"] == "SHT_NOTE" for note in section.iter_notes()]
    metadata: dict[str, Any] = msgspec.msgpack.decode(next(note["n_descdata"] for note in notes if note["n_name"] == "AMDGPU"))
    kernel = next(kernel for kernel in metadata["amdhsa.kernels"] if kernel[".name"] == name)
    spilled = 4 * (kernel[".vgpr_spill_count"] + kernel[".sgpr_spill_count"])
    return BinaryFacts(
        arch=arch,
        registers=kernel[".vgpr_count"] + kernel[".agpr_count"],
        spill_bytes=max(spilled, kernel[".private_segment_fixed_size"]),
        matrix_instructions=dict(Counter(_MATRIX.findall(assembly))),
    )


@lru_cache(maxsize=1)
def _tools() -> Path:
    """The folder of NVIDIA's binary tools that come with Triton, found without importing it."""
    import importlib.util

    spec = importlib.util.find_spec("triton")
    assert spec is not None  # it has just compiled a kernel
    assert spec.origin is not None
    return Path(spec.origin).parent / "backends" / "nvidia" / "bin"


def _cuobjdump(data: bytes, what: str) -> str:
    import tempfile

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(data)
        file.flush()
        result = subprocess.run([_tools() / "cuobjdump", what, file.name], capture_output=True, text=True, check=False)
    if result.returncode:
        raise ToolchainError(f"cuobjdump {what} failed: {' '.join(result.stderr.split())[:200]}")
    return result.stdout
