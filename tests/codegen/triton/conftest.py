"""Runs generated kernels on numpy arrays, through the interpreter or on a GPU, and builds them for real architectures."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llmc.codegen.triton.build import Architecture, BuiltKernel, build
from llmc.codegen.triton.kernel import Kernel
from llmc.runtime.executor.interpretation import InterpretedKernel, Pointer
from llmc.runtime.executor.launch import Launch, extent
from llmc.runtime.program import KernelEntry, ParameterEntry

ARCHITECTURES = {
    "sm_80": Architecture(name="sm_80", backend="cuda", shared_memory_per_block_bytes=166912),
    "sm_89": Architecture(name="sm_89", backend="cuda", shared_memory_per_block_bytes=101376),
    "sm_90": Architecture(name="sm_90", backend="cuda", shared_memory_per_block_bytes=232448),
    "sm_100": Architecture(name="sm_100", backend="cuda", shared_memory_per_block_bytes=232448),
    "gfx942": Architecture(name="gfx942", backend="rocm", shared_memory_per_block_bytes=65536),
}
ON_GPU = bool(os.environ.get("LLMC_TEST_GPU"))


class _Interpreter:
    """Arrays are passed by address, in place."""

    def run(self, kernel: Kernel, grid: tuple[int, int, int], arguments: Mapping[str, Any]) -> None:
        values = [
            Pointer(value.ctypes.data, parameter.type) if isinstance(value, np.ndarray) else value
            for parameter, value in zip(kernel.parameters, arguments.values(), strict=True)
        ]
        InterpretedKernel(kernel.source(), kernel.name, f"{kernel.name}.py").launch(grid, values)


class _Gpu:
    """Arrays are copied to the first GPU and back; kernels are built for it."""

    def __init__(self, cache: Path) -> None:
        from llmc.runtime.devices import survey_cuda
        from llmc.runtime.executor.cuda_device import CudaDevice

        survey = survey_cuda()
        assert survey.devices, survey.problem
        self.arch = ARCHITECTURES["sm_{}{}".format(*survey.devices[0].capability)]
        self.device = CudaDevice(survey.devices[0])
        self.stream = self.device.stream()
        self.cache = cache
        self.loaded: set[str] = set()

    def run(self, kernel: Kernel, grid: tuple[int, int, int], arguments: Mapping[str, Any]) -> None:
        if any("fp8e4b8" in parameter.type for parameter in kernel.parameters):
            pytest.skip("FNUZ numbers are AMD's")
        self._load(kernel)
        places: dict[int, tuple[int, np.ndarray]] = {}  # by the array's address: one array may be several arguments
        for value in arguments.values():
            if isinstance(value, np.ndarray) and value.ctypes.data not in places:
                address = self.device.allocate(value.nbytes, "a test's array")
                self.device.copy_in(self.stream, address, value.ctypes.data, value.nbytes)
                places[value.ctypes.data] = (address, value)
        values = [places[v.ctypes.data][0] if isinstance(v, np.ndarray) else int(v) for v in arguments.values()]
        self.device.launch(self.stream, [Launch(kernel.name, grid, tuple(values))])
        for address, array in places.values():
            self.device.copy_out(self.stream, array.ctypes.data, address, array.nbytes)
        self.device.synchronize(self.stream)

    def _load(self, kernel: Kernel) -> None:
        if kernel.name in self.loaded:
            return
        built = build([kernel], self.arch, cache=self.cache)[kernel.name]
        entry = KernelEntry(
            source="",
            binary="",
            parameters=[ParameterEntry(p.name, p.type) for p in kernel.parameters],
            num_warps=built.num_warps,
            shared_bytes=built.shared_bytes,
            registers=built.registers,
            spill_bytes=0,
            matrix_instructions={},
        )
        self.device.load(kernel.name, entry, 32, built.binary, Path(kernel.name))
        self.loaded.add(kernel.name)


@pytest.fixture(scope="session")
def _machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Interpreter | _Gpu]:
    if not ON_GPU:
        yield _Interpreter()
        return
    gpu = _Gpu(tmp_path_factory.mktemp("kernels"))
    yield gpu
    gpu.device.close()


@pytest.fixture(scope="session")
def launch(_machine: _Interpreter | _Gpu) -> Callable[..., None]:
    """`launch(kernel, {"x": array, "num_tokens": 5, ...}, T=5, R=1, B=2)`: arrays are changed in place.

    The element type comes from the kernel's signature: bf16 data lives in uint16 arrays, fp8 in uint8. With LLMC_TEST_GPU set
    the kernel runs on the GPU here, else in the interpreter.
    """

    def run(kernel: Kernel, arguments: Mapping[str, Any], **symbols: int) -> None:
        assert list(arguments) == [p.name for p in kernel.parameters]
        for parameter in kernel.parameters:
            value = arguments[parameter.name]
            if isinstance(value, np.ndarray):
                assert value.flags.c_contiguous, parameter.name
                assert parameter.type.startswith("*"), parameter.name
        x, y, z = (extent(axis, symbols) for axis in kernel.grid)
        if x and y and z:
            _machine.run(kernel, (x, y, z), arguments)

    return run


@pytest.fixture(scope="session")
def build_for(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, BuiltKernel]]:
    """`build_for("sm_90", [kernel, ...])` compiles and checks: arch, no spills, shared memory within the limit."""
    folder: Path = tmp_path_factory.mktemp("kernels")

    def run(arch: str, kernels: Sequence[Kernel]) -> dict[str, BuiltKernel]:
        return build(kernels, ARCHITECTURES[arch], cache=folder)

    return run
