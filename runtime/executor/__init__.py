"""Runs a program's steps on a device: one executor for each way to do so."""

from __future__ import annotations

from ...errors import UsageError
from ..bundle import Bundle
from ..pool_size import PoolSize
from .base import SAMPLING_DTYPE, Executor, Logits, StepBatch

__all__ = ["SAMPLING_DTYPE", "Executor", "Logits", "StepBatch", "make_executor"]


def make_executor(bundle: Bundle, *, pool: PoolSize, max_num_seqs: int, num_threads: int | None, level: str | None) -> Executor:
    """The executor that `Bundle.open` has chosen; `num_threads` and `level` are of a CPU's alone.

    Raises BundleError, CapacityError, MissingExtraError and UsageError.
    """
    choice = bundle.choice
    if choice is None or choice.executor == "cpu":
        from .cpu import CpuExecutor

        return CpuExecutor(bundle, pool=pool, max_num_seqs=max_num_seqs, num_threads=num_threads, level=level)
    if level is not None:
        raise UsageError(f"level={level!r} is for CPU targets, and {choice.target!r} is for a GPU; leave it out")
    if choice.executor == "interpreter":
        from .interpreter import InterpreterExecutor

        return InterpreterExecutor(bundle, pool=pool)
    from .cuda import CudaExecutor
    from .cuda_device import CudaDevice

    assert choice.device is not None
    device = CudaDevice(choice.device)
    try:
        return CudaExecutor(bundle, device, pool=pool, max_num_seqs=max_num_seqs)
    except BaseException:
        device.close()
        raise
