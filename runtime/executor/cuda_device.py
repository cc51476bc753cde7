"""An NVIDIA GPU through cuda.core and the driver API beneath it: the only file of the runtime that calls CUDA."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import BundleError, CapacityError, MissingExtraError
from .. import devices
from ..program import KernelEntry
from .launch import Launch

_STATIC_SHARED_BYTES = 48 << 10  # dynamic shared memory beyond this must be asked for
_SCRATCH_POINTERS = 2  # Triton's kernels end with pointers to global and profiling scratch, which ours do not use
_NUMBERS: dict[str, Callable[[int | float], object]] = {
    "i32": np.int32,
    "u32": np.uint32,
    "i64": np.int64,
    "u64": np.uint64,
    "fp32": np.float32,
}


@dataclass(frozen=True, slots=True)
class _Kernel:
    """A loaded kernel and what a launch of it needs; `code` is kept because it owns the library."""

    kernel: Any
    code: Any
    num_threads: int
    shared_bytes: int
    convert: tuple[Callable[[int | float], object], ...]
    trailing: tuple[int, ...]

    def arguments(self, values: Sequence[int | float]) -> list[object]:
        """Addresses as Python integers, which cuda.core takes for pointers, and numpy scalars of the exact width."""
        return [convert(value) for convert, value in zip(self.convert, values, strict=True)] + [*self.trailing]


class CudaDevice:
    """A `GpuDevice`. Memory comes straight from cuMemAlloc rather than a pool, so that closing gives it back to the device."""

    def __init__(self, device: devices.CudaDevice) -> None:
        """Make a context on the device; raises MissingExtraError without cuda.core."""
        try:
            self._core: Any = import_module("cuda.core")
            self._driver: Any = import_module("cuda.bindings.driver")
        except ImportError:
            raise MissingExtraError(
                f"CUDA targets need the package cuda.core, which is not installed; run: {devices.INSTALL_CUDA}"
            ) from None
        self.description = device.description
        self._device = self._core.Device(device.ordinal)
        self.activate()
        self._kernels: dict[str, _Kernel] = {}
        self._streams: list[Any] = []
        self._events: list[Any] = []
        self._graphs: list[tuple[Any, Any]] = []  # with the builder of each
        self._memory: list[Any] = []
        self._host_memory: list[Any] = []

    def activate(self) -> None:
        """Make the device the calling thread's; before other calls, in every thread that makes them."""
        self._device.set_current()

    def free_bytes(self) -> int:
        """Memory that can be allocated now."""
        free, _ = self._call("cuMemGetInfo")
        return int(free)

    def allocate(self, num_bytes: int, what: str) -> int:
        """The address of device memory with any content; raises CapacityError, which names `what`."""
        error, address = self._driver.cuMemAlloc(max(num_bytes, 1))
        if error == self._driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            free, total = self._call("cuMemGetInfo")
            raise CapacityError(
                f"cannot allocate {num_bytes} bytes for the {what} on {self.description}: {free} of {total} are free; "
                "load with a smaller kv_cache_bytes or max_num_seqs, or a target with smaller weights"
            )
        self._check(error, "cuMemAlloc")
        self._memory.append(address)
        return int(address)

    def allocate_host(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Host memory that copies need not be staged for; raises CapacityError."""
        error, address = self._driver.cuMemAllocHost(max(num_bytes, 1))
        if error == self._driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise CapacityError(f"cannot allocate {num_bytes} bytes of page-locked memory for {self.description}")
        self._check(error, "cuMemAllocHost")
        self._host_memory.append(address)
        return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(int(address)))

    def stream(self) -> int:
        """A new stream."""
        self._streams.append(self._device.create_stream())
        return len(self._streams) - 1

    def event(self) -> int:
        """A new event."""
        self._events.append(self._device.create_event())
        return len(self._events) - 1

    def record(self, event: int, stream: int) -> None:
        """The event happens when the stream gets here."""
        self._streams[stream].record(self._events[event])

    def wait(self, stream: int, event: int) -> None:
        """The stream goes on when the event, as last recorded, has happened."""
        self._streams[stream].wait(self._events[event])

    def synchronize(self, stream: int) -> None:
        """Return when the stream has nothing left to do."""
        self._streams[stream].sync()

    def synchronize_event(self, event: int) -> None:
        """Return when the event, as last recorded, has happened; at once if it was never recorded."""
        self._events[event].sync()

    def zero(self, stream: int, address: int, num_bytes: int) -> None:
        """Queue filling device memory with zeros."""
        self._call("cuMemsetD8Async", address, 0, num_bytes, self._streams[stream].handle)

    def copy_in(self, stream: int, address: int, source: int, num_bytes: int) -> None:
        """Queue a copy from the host's `source` to the device's `address`."""
        self._call("cuMemcpyHtoDAsync", address, source, num_bytes, self._streams[stream].handle)

    def copy_out(self, stream: int, target: int, address: int, num_bytes: int) -> None:
        """Queue a copy from the device's `address` to the host's `target`."""
        self._call("cuMemcpyDtoHAsync", target, address, num_bytes, self._streams[stream].handle)

    def load(self, name: str, entry: KernelEntry, warp_size: int, binary: bytes, where: Path) -> None:
        """Load the kernel `name`; raises BundleError, which names `where`, for a binary that the driver refuses."""
        try:
            code = self._core.ObjectCode.from_cubin(binary)
            kernel = code.get_kernel(name)
            num_scratch = kernel.num_arguments - len(entry.parameters)
        except Exception as error:  # cuda.core's own kinds
            text = " ".join(str(error).split())
            raise BundleError(f"{where}: {self.description} refuses the kernel: {text[:300]}; update the driver") from None
        if not 0 <= num_scratch <= _SCRATCH_POINTERS:
            raise BundleError(
                f"{where}: takes {kernel.num_arguments} parameters, but program.json lists {len(entry.parameters)}; compile again"
            )
        if entry.shared_bytes > _STATIC_SHARED_BYTES:
            attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            try:
                self._call("cuKernelSetAttribute", attribute, entry.shared_bytes, kernel.handle, self._device.device_id)
            except RuntimeError as error:
                raise BundleError(
                    f"{where}: needs {entry.shared_bytes} bytes of shared memory, which {self.description} does not give: {error}"
                ) from None
        self._call("cuKernelGetFunction", kernel.handle)  # loads it now; a first launch during a capture must not
        self._kernels[name] = _Kernel(
            kernel=kernel,
            code=code,
            num_threads=entry.num_warps * warp_size,
            shared_bytes=entry.shared_bytes,
            convert=tuple(_NUMBERS.get(parameter.type, int) for parameter in entry.parameters),
            trailing=(0,) * num_scratch,
        )

    def launch(self, stream: int, launches: Sequence[Launch]) -> None:
        """Queue launches of loaded kernels."""
        self._launch(self._streams[stream], launches)

    def _launch(self, queue: Any, launches: Sequence[Launch]) -> None:
        for launch in launches:
            kernel = self._kernels[launch.kernel]
            config = self._core.LaunchConfig(grid=launch.grid, block=kernel.num_threads, shmem_size=kernel.shared_bytes)
            self._core.launch(queue, config, kernel.kernel, *kernel.arguments(launch.values))

    def capture(self, stream: int, launches: Sequence[Launch]) -> int:
        """A graph of launches, which are not run."""
        builder = self._streams[stream].create_graph_builder()
        builder.begin_building()
        try:
            self._launch(builder, launches)
        except BaseException:
            for undo in (builder.end_building, builder.close):
                with suppress(Exception):  # the launch's own error is the one to tell
                    undo()
            raise
        graph = builder.end_building().complete()
        graph.upload(self._streams[stream])
        self._graphs.append((graph, builder))
        return len(self._graphs) - 1

    def replay(self, stream: int, graph: int) -> None:
        """Queue all launches of a graph."""
        self._graphs[graph][0].launch(self._streams[stream])

    def close(self) -> None:
        """Free everything. No other method may be called after it."""
        self.activate()
        with suppress(Exception):  # after a kernel has failed the context refuses everything, this too
            self._device.sync()
        for graph, builder in self._graphs:
            graph.close()
            builder.close()
        for closable in (*self._events, *self._streams):
            closable.close()
        self._kernels.clear()
        for address in self._memory:
            self._driver.cuMemFree(address)
        for address in self._host_memory:
            self._driver.cuMemFreeHost(address)
        for made in (self._graphs, self._events, self._streams, self._memory, self._host_memory):
            made.clear()

    def _call(self, name: str, *arguments: object) -> tuple[Any, ...]:
        error, *results = getattr(self._driver, name)(*arguments)
        self._check(error, name)
        return tuple(results)

    def _check(self, error: Any, name: str) -> None:
        if error != self._driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{name} on {self.description} failed: {error.name}")
