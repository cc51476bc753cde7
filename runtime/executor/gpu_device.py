"""What the CUDA executor asks of a GPU: memory, copies, streams, events, launches and graphs; `CudaDevice` is the real one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..program import KernelEntry
from .launch import Launch


class GpuDevice(Protocol):
    """One GPU. Streams, events and graphs are the numbers that the methods which make them return.

    Copies and launches are queued on a stream and run in its order; what the host hands over for a copy must stay as it is
    until the stream has got there. `close` frees all that was made.
    """

    @property
    def description(self) -> str:
        """For people, such as ``NVIDIA H100 80GB HBM3 (sm_90)``."""
        ...

    def activate(self) -> None:
        """Make the device the calling thread's; before other calls, in every thread that makes them."""
        ...

    def free_bytes(self) -> int:
        """Memory that can be allocated now."""
        ...

    def allocate(self, num_bytes: int, what: str) -> int:
        """The address of device memory with any content; raises CapacityError, which names `what`."""
        ...

    def allocate_host(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Host memory that copies need not be staged for; raises CapacityError."""
        ...

    def stream(self) -> int:
        """A new stream."""
        ...

    def event(self) -> int:
        """A new event."""
        ...

    def record(self, event: int, stream: int) -> None:
        """The event happens when the stream gets here."""
        ...

    def wait(self, stream: int, event: int) -> None:
        """The stream goes on when the event, as last recorded, has happened."""
        ...

    def synchronize(self, stream: int) -> None:
        """Return when the stream has nothing left to do."""
        ...

    def synchronize_event(self, event: int) -> None:
        """Return when the event, as last recorded, has happened; at once if it was never recorded."""
        ...

    def zero(self, stream: int, address: int, num_bytes: int) -> None:
        """Queue filling device memory with zeros."""
        ...

    def copy_in(self, stream: int, address: int, source: int, num_bytes: int) -> None:
        """Queue a copy from the host's `source` to the device's `address`."""
        ...

    def copy_out(self, stream: int, target: int, address: int, num_bytes: int) -> None:
        """Queue a copy from the device's `address` to the host's `target`."""
        ...

    def load(self, name: str, entry: KernelEntry, warp_size: int, binary: bytes, where: Path) -> None:
        """Load the kernel `name`; raises BundleError, which names `where`, for a binary that the driver refuses."""
        ...

    def launch(self, stream: int, launches: Sequence[Launch]) -> None:
        """Queue launches of loaded kernels."""
        ...

    def capture(self, stream: int, launches: Sequence[Launch]) -> int:
        """A graph of launches, which are not run."""
        ...

    def replay(self, stream: int, graph: int) -> None:
        """Queue all launches of a graph."""
        ...

    def close(self) -> None:
        """Free everything. No other method may be called after it."""
        ...
