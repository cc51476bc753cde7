"""A buffer on the device with a page-locked twin on the host, which is never written while a copy from it is under way."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .base import StepBatch
from .gpu_device import GpuDevice
from .step_inputs import InputLayout


class Upload:
    """Host memory that is copied to the same place of device memory at `address`, on one stream at a time."""

    def __init__(self, device: GpuDevice, num_bytes: int, what: str) -> None:
        """Allocate both; raises CapacityError."""
        self.address = device.allocate(num_bytes, what)
        self._host = device.allocate_host(num_bytes)
        self._device = device
        self._sent = device.event()

    def begin(self) -> npt.NDArray[np.uint8]:
        """The host's buffer, after the last copy from it."""
        self._device.synchronize_event(self._sent)
        return self._host

    def send(self, stream: int, offset: int, num_bytes: int) -> None:
        """Queue a copy of part of the buffer."""
        source = self._host[offset:].ctypes.data
        self._device.copy_in(stream, self.address + offset, source, num_bytes)
        self._device.record(self._sent, stream)

    def send_batch(self, stream: int, batch: StepBatch) -> dict[str, int]:
        """Queue a copy of the arrays of a step; returns the address of each on the device."""
        layout = InputLayout.of_batch(batch)
        layout.write(batch, self.begin())
        self.send(stream, 0, layout.num_bytes)
        return layout.addresses(self.address)
