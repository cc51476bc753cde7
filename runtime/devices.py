"""What this machine has to run a bundle on: its processor, and NVIDIA devices if there is a driver; asking never raises."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from dataclasses import dataclass
from importlib import import_module
from typing import Any

INSTALL_CUDA = "pip install 'llmc[cuda]'"
_DRIVERS = ("nvcuda.dll",) if sys.platform == "win32" else ("libcuda.so.1", "libcuda.so")


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaDevice:
    """One NVIDIA device, by its ordinal in CUDA's order, which CUDA_VISIBLE_DEVICES changes."""

    ordinal: int
    name: str
    capability: tuple[int, int]

    @property
    def arch(self) -> str:
        """Such as `sm_90`."""
        return f"sm_{self.capability[0]}{self.capability[1]}"

    @property
    def description(self) -> str:
        """Such as `NVIDIA H100 80GB HBM3 (sm_90)`."""
        return f"{self.name} ({self.arch})"

    def runs(self, arch: str) -> bool:
        """Whether a binary for `arch` runs here.

        Binaries run on devices of the same major version and at least their minor one. From 9.0 on Triton builds for an
        architecture's own instructions (`sm_90a`), which no other has.
        """
        built = parse_arch(arch)
        if built is None:
            return False
        if built >= (9, 0):
            return built == self.capability
        return built[0] == self.capability[0] and built[1] <= self.capability[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaSurvey:
    """The NVIDIA devices, or why there are none; `missing_extra` if cuda.core is all that is missing."""

    devices: tuple[CudaDevice, ...] = ()
    problem: str = ""
    missing_extra: bool = False


def parse_arch(arch: str) -> tuple[int, int] | None:
    """`sm_90` -> (9, 0), `sm_100a` -> (10, 0); None for anything else."""
    match = re.fullmatch(r"sm_(\d{1,2})(\d)[af]?", arch)
    return (int(match[1]), int(match[2])) if match else None


def this_processor() -> str:
    """Such as `x86_64-linux`; what a CPU program's `machine` must be."""
    # platform.machine() would do, but importing platform costs more than the rest of this module.
    return f"{os.uname().machine if hasattr(os, 'uname') else 'unknown'}-{sys.platform}"


def survey_cuda() -> CudaSurvey:
    """Look for NVIDIA devices. Without a driver nothing is imported."""
    if not _has_driver():
        return CudaSurvey(problem="no NVIDIA driver is installed here")
    try:
        driver: Any = import_module("cuda.bindings.driver")
        core: Any = import_module("cuda.core")
    except ImportError:
        return CudaSurvey(problem=f"cuda.core is not installed: {INSTALL_CUDA}", missing_extra=True)
    try:
        (error,) = driver.cuInit(0)
        if error == driver.CUresult.CUDA_ERROR_NO_DEVICE:
            return CudaSurvey(problem="the NVIDIA driver finds no device here")
        if error != driver.CUresult.CUDA_SUCCESS:
            return CudaSurvey(problem=f"the NVIDIA driver does not start: {error.name}")
        error, count = driver.cuDeviceGetCount()
        if error != driver.CUresult.CUDA_SUCCESS or not count:
            return CudaSurvey(problem="the NVIDIA driver finds no device here")
        return CudaSurvey(devices=tuple(_describe(core.Device(ordinal)) for ordinal in range(count)))
    except Exception as error:  # whatever a half-installed driver raises: the other targets must still run
        return CudaSurvey(problem=f"the NVIDIA driver does not work: {' '.join(str(error).split())[:200]}")


def _describe(device: Any) -> CudaDevice:
    major, minor = device.compute_capability
    return CudaDevice(ordinal=device.device_id, name=device.name, capability=(int(major), int(minor)))


def _has_driver() -> bool:
    for name in _DRIVERS:
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return True
    return False
