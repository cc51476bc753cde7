"""Code generators: one for each kind of device."""

from __future__ import annotations

from ..errors import TargetError
from ..targets import Target
from .backend import Backend, LoweredProgram, ModelShape, ProgramOptions, StoredWeight

__all__ = ["Backend", "LoweredProgram", "ModelShape", "ProgramOptions", "StoredWeight", "make_backend"]


def make_backend(target: Target, options: ProgramOptions) -> Backend:
    """The code generator of the target's backend. Raises `TargetError` and `UsageError` for options that it cannot serve."""
    if target.backend == "cpu":
        from .cpu.backend import CpuBackend

        return CpuBackend(target, options)
    if target.backend in ("cuda", "rocm"):
        from .triton.backend import GpuBackend

        return GpuBackend(target, options)
    raise TargetError(f"target {target.name!r} has backend {target.backend!r}; code is generated for cpu, cuda and rocm")
