"""Runs a GPU program on the CPU: its kernels, one after another, through Triton's interpreter. For tests and debugging."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ...errors import BundleError, LlmcError
from ..bundle import Bundle
from ..memory import address_of, allocate, available_bytes
from ..pool_size import PoolSize
from ..program import GpuProgram
from ..program_checks import INPUTS
from .base import HostLogits, Int32, Logits, StepBatch
from .interpretation import InterpretedKernel, Pointer, find_interpreter
from .launch import Launch, Memory, plan, plan_step


class InterpreterExecutor:
    """An `Executor` over the sources of a bundle's kernels, which are the same for every architecture."""

    def __init__(self, bundle: Bundle, *, pool: PoolSize) -> None:
        """Check the sources and map the memory.

        Raises BundleError for a source that is not Python, CapacityError, MissingExtraError without Triton, and UsageError
        where Triton has been imported for compiling.
        """
        program = bundle.program
        assert isinstance(program, GpuProgram)
        find_interpreter()
        for kernel in program.kernels.values():
            path, source = bundle.beside_program(kernel.source)
            _parse(source, path)
        self._bundle = bundle  # keeps the weights mapped
        self._program = program
        self._kernels: dict[str, InterpretedKernel] = {}
        self.num_kv_blocks = pool.on_host(available_bytes() // 2)
        self.max_logit_rows = program.max_tokens
        self._arena = allocate(program.arena_bytes, "arena")
        self._kv_pool = allocate(self.num_kv_blocks * program.kv_cache.bytes_per_block, "KV pool")
        self._memory = Memory(vocab_size=program.vocab_size, arena=address_of(self._arena), kv_pool=address_of(self._kv_pool))

    @property
    def description(self) -> str:
        """Such as ``Triton's interpreter (sm_90 kernels)``."""
        return f"Triton's interpreter ({self._program.machine} kernels)"

    def bind_weights(self) -> None:
        """Take the weights from the bundle, once their hash is known; raises BundleError. Before the first step."""
        self._memory = replace(self._memory, weights=self._bundle.weight_addresses())

    def step(self, batch: StepBatch) -> Logits:
        """Compute the batch; raises BundleError for one larger than the program's, or a kernel that cannot be used."""
        if len(batch.token_ids) > self._program.max_tokens:
            raise BundleError(f"a step of {len(batch.token_ids)} tokens is more than the program's {self._program.max_tokens}")
        logits = np.empty((len(batch.logit_rows), self._program.vocab_size), np.float32)
        inputs = {name: getattr(batch, name).ctypes.data for name in INPUTS}
        memory = replace(self._memory, logits=logits.ctypes.data, inputs=inputs)
        self._run(plan_step(self._program, batch, memory))
        return HostLogits(logits)

    def sample(self, logits: Logits, sampling: npt.NDArray[np.void]) -> Int32:
        """One token id for each row of `logits`; `sampling` has one `SAMPLING_DTYPE` record for each row."""
        values = logits.numpy()
        token_ids = np.empty(len(values), np.int32)
        memory = replace(self._memory, logits=values.ctypes.data, sampling=sampling.ctypes.data, sampled=token_ids.ctypes.data)
        self._run(plan([self._program.sampler], memory, {"R": len(values)}))
        return token_ids

    def close(self) -> None:
        """Free the memory. No other method may be called after it."""
        self._kernels = {}
        self._arena.close()
        self._kv_pool.close()

    def _run(self, launches: list[Launch]) -> None:
        for launch in launches:
            parameters = self._program.kernels[launch.kernel].parameters
            values = [
                Pointer(int(value), parameter.type) if parameter.type.startswith("*") else value
                for value, parameter in zip(launch.values, parameters, strict=True)
            ]
            self._kernel(launch.kernel).launch(launch.grid, values)

    def _kernel(self, name: str) -> InterpretedKernel:
        if name not in self._kernels:
            path, source = self._bundle.beside_program(self._program.kernels[name].source)
            try:
                self._kernels[name] = InterpretedKernel(source.decode(), name, str(path))
            except LlmcError:
                raise
            except Exception as error:  # the source is run as it is: whatever it raises makes the kernel unusable
                text = " ".join(f"{type(error).__name__}: {error}".split())
                raise BundleError(f"{path}: does not define kernel {name}: {text[:300]}; compile the bundle again") from None
        return self._kernels[name]


def _parse(source: bytes, path: Path) -> None:
    """Refuse a source that is not Python before anything is run; raises BundleError."""
    try:
        compile(source, str(path), "exec")
    except (SyntaxError, ValueError) as error:
        line = f" (line {error.lineno})" if isinstance(error, SyntaxError) else ""
        raise BundleError(f"{path}: not a kernel's source: {error.args[0]}{line}; compile the bundle again") from None
