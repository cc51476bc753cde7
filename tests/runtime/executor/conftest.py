"""A fake GPU, made of the host's memory and Triton's interpreter."""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from llmc.errors import CapacityError
from llmc.runtime.executor.interpretation import InterpretedKernel, Pointer
from llmc.runtime.executor.launch import Launch
from llmc.runtime.program import KernelEntry

KERNELS = Path(__file__).parents[1] / "toy_kernels.py"
_interpreted: dict[str, InterpretedKernel] = {}


class FakeDevice:
    """A `GpuDevice` whose streams run as late as they may and, seen together, in an order drawn from `seed`.

    What a real GPU leaves open is decided differently by every seed: a copy from a host buffer happens long after it was
    queued, and two streams run in any order that their events allow. Memory begins with poison. `log` has every call.
    """

    description = "Fake GPU (sm_90)"

    def __init__(self, seed: int = 0, total_bytes: int = 1 << 24) -> None:
        self.log: list[tuple[object, ...]] = []
        self._random = random.Random(seed)
        self._free = total_bytes
        self._regions: list[np.ndarray] = []
        self._host: list[np.ndarray] = []
        self._queues: list[deque[tuple[str, object, object]]] = []
        self._recorded: list[int] = []  # of each event: how often it was recorded, and how often it has happened
        self._happened: list[int] = []
        self._entries: dict[str, KernelEntry] = {}
        self._graphs: list[list[Launch]] = []
        self.active = False
        self.closed = False

    def activate(self) -> None:
        self.active = True

    def free_bytes(self) -> int:
        assert self.active
        return self._free

    def allocate(self, num_bytes: int, what: str) -> int:
        if num_bytes > self._free:
            raise CapacityError(f"cannot allocate {num_bytes} bytes for the {what}: {self._free} are free")
        self._free -= num_bytes
        self._regions.append(np.full(num_bytes + 256, 0xCD, np.uint8))
        return -(-self._regions[-1].ctypes.data // 256) * 256

    def allocate_host(self, num_bytes: int) -> np.ndarray:
        self._host.append(np.full(num_bytes, 0xCD, np.uint8))
        return self._host[-1]

    def stream(self) -> int:
        self._queues.append(deque())
        return len(self._queues) - 1

    def event(self) -> int:
        self._recorded.append(0)
        self._happened.append(0)
        return len(self._recorded) - 1

    def record(self, event: int, stream: int) -> None:
        self._recorded[event] += 1
        self._queue(stream, "record", event, self._recorded[event])

    def wait(self, stream: int, event: int) -> None:
        self._queue(stream, "wait", event, self._recorded[event])

    def synchronize(self, stream: int) -> None:
        self.log.append(("synchronize", stream))
        while self._queues[stream]:
            self._run_something()

    def synchronize_event(self, event: int) -> None:
        while self._happened[event] < self._recorded[event]:
            self._run_something()

    def zero(self, stream: int, address: int, num_bytes: int) -> None:
        self._check(address, num_bytes)
        self._queue(stream, "run", lambda: ctypes.memset(address, 0, num_bytes))

    def copy_in(self, stream: int, address: int, source: int, num_bytes: int) -> None:
        self._check(address, num_bytes)
        self._queue(stream, "run", lambda: ctypes.memmove(address, source, num_bytes))

    def copy_out(self, stream: int, target: int, address: int, num_bytes: int) -> None:
        self._check(address, num_bytes)
        self._queue(stream, "run", lambda: ctypes.memmove(target, address, num_bytes))

    def load(self, name: str, entry: KernelEntry, warp_size: int, binary: bytes, where: Path) -> None:
        assert binary.startswith(b"\x7fELF")
        self._entries[name] = entry

    def launch(self, stream: int, launches: Sequence[Launch]) -> None:
        self.log.append(("launch", stream, *(launch.kernel for launch in launches)))
        for launch in launches:
            self._queue(stream, "run", lambda launch=launch: self._interpret(launch))

    def capture(self, stream: int, launches: Sequence[Launch]) -> int:
        self.log.append(("capture", stream, len(self._graphs)))
        self._graphs.append(list(launches))
        return len(self._graphs) - 1

    def replay(self, stream: int, graph: int) -> None:
        self.log.append(("replay", stream, graph))
        for launch in self._graphs[graph]:
            self._queue(stream, "run", lambda launch=launch: self._interpret(launch))

    def close(self) -> None:
        self.closed = True
        self._regions.clear()
        self._host.clear()

    def _queue(self, stream: int, kind: str, what: object, count: object = None) -> None:
        assert self.active
        assert not self.closed
        self._queues[stream].append((kind, what, count))

    def _check(self, address: int, num_bytes: int) -> None:
        assert any(
            region.ctypes.data <= address and address + num_bytes <= region.ctypes.data + region.nbytes
            for region in self._regions
        ), "not memory of the device"

    def _run_something(self) -> None:
        ready = [queue for queue in self._queues if queue and not self._is_blocked(*queue[0])]
        assert ready, "the streams wait for each other"
        kind, what, count = self._random.choice(ready).popleft()
        if kind == "record":
            assert isinstance(what, int)
            assert isinstance(count, int)
            self._happened[what] = count
        elif kind == "run":
            assert callable(what)
            what()

    def _is_blocked(self, kind: str, what: object, count: object) -> bool:
        return kind == "wait" and self._happened[what] < count  # type: ignore[index,operator]

    def _interpret(self, launch: Launch) -> None:
        values: list[Pointer | int] = []
        for value, parameter in zip(launch.values, self._entries[launch.kernel].parameters, strict=True):
            if parameter.type.startswith("*"):
                self._check(value, 1)
                assert value % 16 == 0, f"{parameter.name} of {launch.kernel} is not aligned, as Triton was promised"
                values.append(Pointer(value, parameter.type))
            else:
                values.append(value)
        if launch.kernel not in _interpreted:
            _interpreted[launch.kernel] = InterpretedKernel(KERNELS.read_text(), launch.kernel, str(KERNELS))
        _interpreted[launch.kernel].launch(launch.grid, values)


@pytest.fixture
def fake_device() -> Callable[..., FakeDevice]:
    """`fake_device(seed=3)` makes one."""
    pytest.importorskip("triton")
    return FakeDevice
