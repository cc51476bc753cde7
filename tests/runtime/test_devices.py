"""Looking for NVIDIA devices never raises, whatever is or is not installed."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from llmc.runtime import devices


class FakeResult:
    """The members of CUresult that matter."""

    CUDA_SUCCESS = SimpleNamespace(name="CUDA_SUCCESS")
    CUDA_ERROR_NO_DEVICE = SimpleNamespace(name="CUDA_ERROR_NO_DEVICE")
    CUDA_ERROR_SYSTEM_DRIVER_MISMATCH = SimpleNamespace(name="CUDA_ERROR_SYSTEM_DRIVER_MISMATCH")


def survey(monkeypatch: pytest.MonkeyPatch, *, start: Any = FakeResult.CUDA_SUCCESS, count: int = 2) -> devices.CudaSurvey:
    """With fakes of cuda.core and the driver in place of the real ones."""

    def start_driver(flags: int) -> tuple[Any]:
        if isinstance(start, Exception):
            raise start
        return (start,)

    modules = {
        "cuda.bindings.driver": SimpleNamespace(
            CUresult=FakeResult, cuInit=start_driver, cuDeviceGetCount=lambda: (FakeResult.CUDA_SUCCESS, count)
        ),
        "cuda.core": SimpleNamespace(
            Device=lambda ordinal: SimpleNamespace(device_id=ordinal, name=f"GPU {ordinal}", compute_capability=(9, ordinal))
        ),
    }
    monkeypatch.setattr(devices, "_has_driver", lambda: True)
    monkeypatch.setattr(devices, "import_module", modules.__getitem__)
    return devices.survey_cuda()


def test_what_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    found = survey(monkeypatch).devices
    assert [(device.ordinal, device.description) for device in found] == [(0, "GPU 0 (sm_90)"), (1, "GPU 1 (sm_91)")]


def test_every_way_to_find_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = "the NVIDIA driver finds no device here"
    assert survey(monkeypatch, start=FakeResult.CUDA_ERROR_NO_DEVICE).problem == nothing
    assert survey(monkeypatch, count=0).problem == nothing
    mismatch = survey(monkeypatch, start=FakeResult.CUDA_ERROR_SYSTEM_DRIVER_MISMATCH)
    assert mismatch.problem == "the NVIDIA driver does not start: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"
    assert survey(monkeypatch, start=RuntimeError("no\n libcuda")).problem == "the NVIDIA driver does not work: no libcuda"

    def absent(name: str) -> Any:
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(devices, "import_module", absent)
    missing = devices.survey_cuda()
    assert missing.missing_extra
    assert missing.problem == "cuda.core is not installed: pip install 'llmc[cuda]'"
    monkeypatch.setattr(devices, "_has_driver", lambda: False)
    assert devices.survey_cuda().problem == "no NVIDIA driver is installed here"


def test_this_machine_can_be_asked() -> None:
    """Whatever it has; without a driver nothing of CUDA is imported."""
    script = (
        "import sys\nfrom llmc.runtime.devices import survey_cuda, this_processor\nsurvey = survey_cuda()\n"
        "assert survey.devices or survey.problem\nassert survey.devices or 'no NVIDIA driver' not in survey.problem or "
        "not [name for name in sys.modules if name.startswith('cuda')]\nprint(this_processor())"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip().endswith(f"-{sys.platform}")
