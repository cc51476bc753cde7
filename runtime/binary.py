"""Reads from a kernel's binary what it is for: the header of an ELF file, without any library."""

from __future__ import annotations

import struct

from ..errors import BundleError

_HEADER = struct.Struct(
    "<4s B B B B B 7x H H I Q Q Q I"
)  # e_ident, e_type, e_machine, e_version, e_entry, two offsets, e_flags
_CUDA, _AMDGPU = 190, 224
_AMD_ARCHES = {0x3F: "gfx90a", 0x4C: "gfx942", 0x4F: "gfx950"}  # EF_AMDGPU_MACH of the LLVM AMDGPU guide


def binary_arch(data: bytes, where: str) -> str:
    """The architecture of a cubin or hsaco, such as `sm_90` or `gfx942`; raises BundleError for any other file."""
    if len(data) < _HEADER.size or data[:6] != b"\x7fELF\x02\x01":
        raise BundleError(
            f"{where}: not a kernel's binary: it does not begin as a 64-bit ELF file does; compile the bundle again"
        )
    _, _, _, _, _, abi_version, _, machine, *_, flags = _HEADER.unpack_from(data)
    if machine == _CUDA:
        return f"sm_{flags >> 8 & 0xFF if abi_version >= 8 else flags & 0xFF}"
    if machine == _AMDGPU:
        return _AMD_ARCHES.get(flags & 0xFF, f"AMD machine {flags & 0xFF:#x}")
    raise BundleError(
        f"{where}: built for ELF machine {machine}, expected {_CUDA} (CUDA) or {_AMDGPU} (AMDGPU); compile the bundle again"
    )


def check_binary(data: bytes, arch: str, name: str, where: str) -> None:
    """Refuse a binary for another architecture than `arch`, or without the kernel `name`; raises BundleError."""
    found = binary_arch(data, where)
    if found != arch:
        raise BundleError(f"{where}: built for {found}, but program.json says {arch}; compile the bundle again")
    if b"\0" + name.encode() + b"\0" not in data:  # its entry in the table of symbol names
        raise BundleError(f"{where}: does not define kernel {name}; compile the bundle again")
