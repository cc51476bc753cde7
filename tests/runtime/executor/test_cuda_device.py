"""The real CUDA device: with fakes of cuda.core and the driver that check the calls, and on a GPU where there is one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from llmc.errors import BundleError, CapacityError, MissingExtraError
from llmc.runtime import devices
from llmc.runtime.devices import survey_cuda
from llmc.runtime.executor import cuda_device
from llmc.runtime.executor.cuda_device import CudaDevice
from llmc.runtime.executor.launch import Launch
from llmc.runtime.program import KernelEntry, ParameterEntry

CHOSEN = devices.CudaDevice(ordinal=1, name="Fake", capability=(9, 0))
WHERE = Path("k.cubin")


class FakeDriver:
    """The driver API as a log; `results` gives what a function answers after its error code, `errors` the code."""

    CUresult = SimpleNamespace(
        CUDA_SUCCESS=SimpleNamespace(name="CUDA_SUCCESS"),
        CUDA_ERROR_OUT_OF_MEMORY=SimpleNamespace(name="CUDA_ERROR_OUT_OF_MEMORY"),
    )
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="shared")

    def __init__(self, log: list[Any]) -> None:
        self.log = log
        self.buffer = np.zeros(64, np.uint8)
        self.errors: dict[str, Any] = {}
        self.results: dict[str, tuple[Any, ...]] = {
            "cuMemAlloc": (4096,), "cuMemAllocHost": (self.buffer.ctypes.data,), "cuMemGetInfo": (1000, 2000), "cuKernelGetFunction": (1,),
        }  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> tuple[Any, ...]:
            self.log.append((name, *arguments))
            return (self.errors.get(name, self.CUresult.CUDA_SUCCESS), *self.results.get(name, ()))

        return call


class FakeCore:
    """cuda.core as a log; every object is a name."""

    def __init__(self, log: list[Any], num_arguments: int) -> None:
        self.log = log
        self.num_arguments = num_arguments
        self.refuses = False
        self.fails_in_capture = False
        self.ObjectCode = SimpleNamespace(from_cubin=self._code)
        self.LaunchConfig = lambda **options: options

    def _named(self, name: str, **attributes: Any) -> Any:
        log = self.log

        class Named(SimpleNamespace):
            def __getattr__(self, method: str) -> Any:
                def call(*arguments: Any) -> Any:
                    log.append((f"{name}.{method}", *(getattr(argument, "label", argument) for argument in arguments)))
                    if method == "create_graph_builder":
                        return outer._named(f"{name}-builder")
                    if method == "end_building":
                        return self
                    return outer._named("graph") if method == "complete" else None

                return call

        outer = self
        return Named(label=name, handle=f"{name}-handle", **attributes)

    def Device(self, ordinal: int) -> Any:  # noqa: N802
        made = iter(range(100))

        def make(kind: str) -> Any:
            return lambda: self._named(f"{kind}{next(made)}")

        return SimpleNamespace(
            device_id=ordinal,
            set_current=lambda: self.log.append(("set_current", ordinal)),
            create_stream=make("stream"),
            create_event=make("event"),
            sync=lambda: self.log.append(("sync",)),
        )

    def _code(self, binary: bytes) -> Any:
        if self.refuses:
            raise ValueError("CUDA_ERROR_NO_BINARY_FOR_GPU:\n no kernel image")
        return SimpleNamespace(get_kernel=lambda name: self._named(name, num_arguments=self.num_arguments))

    def launch(self, queue: Any, config: dict[str, Any], kernel: Any, *arguments: Any) -> None:
        if self.fails_in_capture and queue.label.endswith("builder"):
            raise RuntimeError("launch failed")
        self.log.append(("launch", queue.label, config, kernel.label, *arguments))


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> tuple[CudaDevice, list[Any], FakeDriver, FakeCore]:
    log: list[Any] = []
    driver, core = FakeDriver(log), FakeCore(log, num_arguments=5)
    modules = {"cuda.core": core, "cuda.bindings.driver": driver}
    monkeypatch.setattr(cuda_device, "import_module", modules.__getitem__)
    return CudaDevice(CHOSEN), log, driver, core


def entry(shared_bytes: int = 1024) -> KernelEntry:
    parameters = [ParameterEntry("x", "*bf16"), ParameterEntry("n", "i32"), ParameterEntry("m", "i64")]
    return KernelEntry(
        source="k.py", binary="k.cubin", parameters=parameters, num_warps=4, shared_bytes=shared_bytes, registers=1, spill_bytes=0,
        matrix_instructions={},
    )  # fmt: skip


def test_a_launch_has_exact_types_and_null_scratch_pointers(parts: Any) -> None:
    device, log, _, _ = parts
    device.load("k", entry(), 32, b"", WHERE)
    stream = device.stream()
    log.clear()
    device.launch(stream, [Launch("k", (3, 2, 1), (1 << 40, 7, 1 << 33))])
    ((*call, pointer, small, large, scratch, profile),) = log
    assert call == ["launch", "stream0", {"grid": (3, 2, 1), "block": 128, "shmem_size": 1024}, "k"]
    assert (pointer, type(pointer)) == (1 << 40, int)
    assert (small, type(small)) == (7, np.int32)
    assert (large, type(large)) == (1 << 33, np.int64)
    assert (scratch, profile) == (0, 0)


@pytest.mark.parametrize("num_arguments", [3, 4, 5])
def test_as_many_null_pointers_as_the_binary_has_beyond_its_parameters(parts: Any, num_arguments: int) -> None:
    device, log, _, core = parts
    core.num_arguments = num_arguments
    device.load("k", entry(), 32, b"", WHERE)
    device.launch(device.stream(), [Launch("k", (1, 1, 1), (0, 0, 0))])
    assert len(log[-1]) == 4 + num_arguments


@pytest.mark.parametrize("num_arguments", [2, 6])
def test_a_binary_with_other_parameters_is_refused(parts: Any, num_arguments: int) -> None:
    device, _, _, core = parts
    core.num_arguments = num_arguments
    with pytest.raises(BundleError, match=rf"k\.cubin: takes {num_arguments} parameters, but program\.json lists 3"):
        device.load("k", entry(), 32, b"", WHERE)


def test_much_shared_memory_is_asked_for(parts: Any) -> None:
    device, log, driver, _ = parts
    device.load("small", entry(48 << 10), 32, b"", WHERE)
    assert not [call for call in log if call[0] == "cuKernelSetAttribute"]
    device.load("large", entry((48 << 10) + 1), 32, b"", WHERE)
    assert ("cuKernelSetAttribute", "shared", (48 << 10) + 1, "large-handle", 1) in log
    assert log[-1] == ("cuKernelGetFunction", "large-handle"), "loaded before any capture"
    driver.errors["cuKernelSetAttribute"] = SimpleNamespace(name="CUDA_ERROR_INVALID_VALUE")
    with pytest.raises(
        BundleError, match=r"needs 99999 bytes of shared memory, which Fake \(sm_90\) does not give: .*INVALID_VALUE"
    ):
        device.load("large", entry(99999), 32, b"", WHERE)


def test_a_refused_binary_is_one_sentence(parts: Any) -> None:
    device, _, _, core = parts
    core.refuses = True
    with pytest.raises(
        BundleError, match=r"^k\.cubin: Fake \(sm_90\) refuses the kernel: CUDA_ERROR_NO_BINARY_FOR_GPU: no kernel"
    ):
        device.load("k", entry(), 32, b"", WHERE)


def test_memory(parts: Any) -> None:
    device, log, driver, _ = parts
    assert device.free_bytes() == 1000
    assert device.allocate(10, "arena") == 4096
    host = device.allocate_host(64)
    host[:] = 3
    assert (driver.buffer == 3).all()
    driver.errors = dict.fromkeys(("cuMemAlloc", "cuMemAllocHost"), driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY)
    with pytest.raises(
        CapacityError, match=r"cannot allocate 77 bytes for the KV pool on Fake \(sm_90\): 1000 of 2000 are free; load"
    ):
        device.allocate(77, "KV pool")
    with pytest.raises(CapacityError, match="77 bytes of page-locked memory"):
        device.allocate_host(77)
    driver.errors["cuMemAlloc"] = SimpleNamespace(name="CUDA_ERROR_UNKNOWN")
    with pytest.raises(RuntimeError, match=r"cuMemAlloc on Fake \(sm_90\) failed: CUDA_ERROR_UNKNOWN"):
        device.allocate(1, "x")
    stream, event = device.stream(), device.event()
    log.clear()
    device.zero(stream, 4096, 8)
    device.copy_in(stream, 4096, 100, 8)
    device.copy_out(stream, 100, 4096, 8)
    device.record(event, stream)
    device.wait(stream, event)
    device.synchronize_event(event)
    device.synchronize(stream)
    device.close()
    assert log == [
        ("cuMemsetD8Async", 4096, 0, 8, "stream0-handle"),
        ("cuMemcpyHtoDAsync", 4096, 100, 8, "stream0-handle"),
        ("cuMemcpyDtoHAsync", 100, 4096, 8, "stream0-handle"),
        ("stream0.record", "event1"), ("stream0.wait", "event1"), ("event1.sync",), ("stream0.sync",),
        ("set_current", 1), ("sync",), ("event1.close",), ("stream0.close",),
        ("cuMemFree", 4096), ("cuMemFreeHost", driver.buffer.ctypes.data),
    ]  # fmt: skip


def test_a_graph_is_captured_on_the_stream_and_closed_at_the_end(parts: Any) -> None:
    device, log, _, _ = parts
    device.load("k", entry(), 32, b"", WHERE)
    stream = device.stream()
    log.clear()
    graph = device.capture(stream, [Launch("k", (1, 1, 1), (0, 0, 0))] * 2)
    device.replay(stream, graph)
    device.close()
    assert [call[0] if call[0] != "launch" else call[:2] for call in log] == [
        "stream0.create_graph_builder", "stream0-builder.begin_building", ("launch", "stream0-builder"), ("launch", "stream0-builder"),
        "stream0-builder.end_building", "stream0-builder.complete", "graph.upload", "graph.launch",
        "set_current", "sync", "graph.close", "stream0-builder.close", "stream0.close",
    ]  # fmt: skip


def test_a_capture_that_fails_is_ended(parts: Any) -> None:
    device, log, _, core = parts
    device.load("k", entry(), 32, b"", WHERE)
    core.fails_in_capture = True
    with pytest.raises(RuntimeError, match="launch failed"):
        device.capture(device.stream(), [Launch("k", (1, 1, 1), (0, 0, 0))])
    assert [call[0] for call in log[-2:]] == ["stream0-builder.end_building", "stream0-builder.close"]


def test_without_cuda_core(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(cuda_device, "import_module", absent)
    with pytest.raises(MissingExtraError, match=r"pip install 'llmc\[cuda\]'"):
        CudaDevice(CHOSEN)


def test_the_names_that_are_used_exist_in_the_installed_cuda_core() -> None:
    """No driver is needed to look at names; whether they do what they say needs a GPU."""
    core = pytest.importorskip("cuda.core")
    driver = pytest.importorskip("cuda.bindings.driver")
    graph = pytest.importorskip("cuda.core.graph")
    used = {
        core: "Device ObjectCode LaunchConfig launch",
        core.Device: "set_current create_stream create_event sync device_id name compute_capability",
        core.Stream: "record wait sync close handle create_graph_builder",
        core.Event: "sync close",
        core.ObjectCode: "from_cubin get_kernel",
        core.Kernel: "num_arguments handle",
        graph.GraphBuilder: "begin_building end_building complete close",
        graph.Graph: "upload launch close",
        driver: "cuInit cuDeviceGetCount cuMemGetInfo cuMemAlloc cuMemFree cuMemAllocHost cuMemFreeHost cuMemsetD8Async cuMemcpyHtoDAsync "
        "cuMemcpyDtoHAsync cuKernelSetAttribute cuKernelGetFunction",
        driver.CUresult: "CUDA_SUCCESS CUDA_ERROR_OUT_OF_MEMORY CUDA_ERROR_NO_DEVICE",
        driver.CUfunction_attribute: "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES",
    }
    missing = [(owner, name) for owner, names in used.items() for name in names.split() if not hasattr(owner, name)]
    assert missing == []
    config = core.LaunchConfig(grid=(3, 2, 1), block=128, shmem_size=1024)
    assert (config.grid, config.block, config.shmem_size) == ((3, 2, 1), (128, 1, 1), 1024)


@pytest.mark.gpu
def test_memory_and_streams_of_a_real_device() -> None:
    survey = survey_cuda()
    if not survey.devices:
        pytest.skip(survey.problem)
    device = CudaDevice(survey.devices[0])
    before = device.free_bytes()
    address = device.allocate(1 << 26, "test")
    assert device.free_bytes() < before
    first, second, event = device.stream(), device.stream(), device.event()
    device.synchronize_event(event)  # never recorded: returns at once
    out = device.allocate_host(1024)
    out[:] = 7
    device.copy_in(first, address, out.ctypes.data, 512)
    device.record(event, first)
    device.wait(second, event)
    device.zero(second, address, 256)
    back = device.allocate_host(512)
    device.copy_out(second, back.ctypes.data, address, 512)
    device.synchronize(second)
    assert back.tolist() == [0] * 256 + [7] * 256
    device.close()
