"""Runs a program's steps on a device: one executor for each backend."""

from __future__ import annotations

from ..bundle import Bundle
from .base import SAMPLING_DTYPE, Executor, StepBatch

__all__ = ["SAMPLING_DTYPE", "Executor", "StepBatch", "make_executor"]


def make_executor(bundle: Bundle, *, num_kv_blocks: int, num_threads: int | None, level: str | None) -> Executor:
    """The executor for the backend of the bundle's target, which `Bundle.open` has found to be one that runs here."""
    from .cpu import CpuExecutor

    return CpuExecutor(bundle, num_kv_blocks=num_kv_blocks, num_threads=num_threads, level=level)
