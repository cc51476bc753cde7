"""`verify_bundle` on GPU targets: what the binaries say of themselves against what program.json says of them."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llmc.errors import BundleError
from llmc.runtime.binary import binary_arch, check_binary
from llmc.runtime.verification import verify_bundle

Build = Callable[..., Path]
ONE = "programs/h100-fp8/kernels/sm_90/toy_logits.bin"


def header(abi_version: int, machine: int, flags: int) -> bytes:
    return struct.pack("<4sBBBBB7xHHIQQQI", b"\x7fELF", 2, 1, 1, 0x41, abi_version, 2, machine, 1, 0, 0, 0, flags).ljust(
        64, b"\0"
    )


@pytest.mark.parametrize(
    ("data", "arch"),
    [  # the first three are the headers of real cubins of Triton 3.9
        (header(7, 190, 0x500550), "sm_80"),
        (header(8, 190, 0x9005A04), "sm_90"),
        (header(8, 190, 0x9006402), "sm_100"),
        (header(7, 190, 0x590559), "sm_89"),
        (header(4, 224, 0x54C), "gfx942"),
        (header(4, 224, 0x501), "AMD machine 0x1"),
    ],
)
def test_the_architecture_of_a_binary(data: bytes, arch: str) -> None:
    assert binary_arch(data, "k") == arch


@pytest.mark.parametrize("data", [b"", b"\x7fELF", b"MZ" * 100, header(7, 190, 0)[:50], b"\x7fELF\x01\x01" + bytes(60)])
def test_what_is_no_binary(data: bytes) -> None:
    with pytest.raises(BundleError, match="k: not a kernel's binary"):
        binary_arch(data, "k")
    with pytest.raises(BundleError, match=r"k: built for ELF machine 62, expected 190 \(CUDA\) or 224"):
        binary_arch(header(0, 62, 0), "k")


def test_a_binary_must_be_for_the_machine_and_define_the_kernel() -> None:
    data = header(8, 190, 90 << 8) + b"\0kernel_a\0"
    check_binary(data, "sm_90", "kernel_a", "k")
    with pytest.raises(BundleError, match=r"k: built for sm_90, but program\.json says sm_80"):
        check_binary(data, "sm_80", "kernel_a", "k")
    with pytest.raises(BundleError, match="k: does not define kernel kernel;"):
        check_binary(data, "sm_90", "kernel", "k")


def test_a_good_bundle(build_gpu_bundle: Build, toy_bundle: Path, tmp_path: Path) -> None:
    targets = {"h100-fp8": ("cuda", "sm_90"), "mi300x-fp8": ("rocm", "gfx942")}
    report = verify_bundle(build_gpu_bundle(tmp_path / "b", targets=targets, cpu_bundle=toy_bundle))
    assert report.problems == []
    details = {check.subject: check.detail for check in report.checks}
    assert details["h100-fp8"] == (
        "5 kernels for sm_90, at most 4096 bytes of shared memory and 36 registers, no spills; not run here"
    )
    assert details["mi300x-fp8"].startswith("5 kernels for gfx942, ")
    assert details["cpu-f32"] == "runs here, level portable"
    assert details["programs/mi300x-fp8/kernels/gfx942/toy_embed.bin"] == "75 bytes"
    assert len(report.kernels) == 10
    (embed,) = [kernel for kernel in report.kernels if (kernel.target, kernel.name) == ("h100-fp8", "toy_embed")]
    assert (embed.arch, embed.shared_bytes, embed.registers, embed.spill_bytes) == ("sm_90", 0, 32, 0)


@pytest.mark.parametrize(
    ("edit", "data", "text"),
    [
        (lambda program: program["kernels"]["toy_logits"].update(spill_bytes=16), None, "spills 16 bytes of registers a thread"),
        (lambda program: None, header(8, 190, 80 << 8) + b"\0toy_logits\0", "built for sm_80, but program.json says sm_90"),
        (lambda program: None, header(8, 190, 90 << 8) + b"\0other\0", "does not define kernel toy_logits"),
        (lambda program: None, b"nothing", "not a kernel's binary"),
    ],
)  # fmt: skip
def test_kernels_that_are_not_as_they_should_be(
    build_gpu_bundle: Build,
    rewrite_manifest: Callable[..., None],
    tmp_path: Path,
    edit: Callable[[dict[str, Any]], object],
    data: bytes | None,
    text: str,
) -> None:
    path = build_gpu_bundle(tmp_path / "b", edit=edit)
    if data is not None:
        (path / ONE).write_bytes(data)
        rewrite_manifest(path, keep_targets=True)
    report = verify_bundle(path)
    (problem,) = report.problems
    assert problem.subject == "h100-fp8 toy_logits"
    assert problem.problem is not None
    assert problem.problem.startswith(str(path / ONE))
    assert text in problem.problem
    assert "1 refused" in next(check.detail for check in report.checks if check.subject == "h100-fp8")


def test_neither_triton_nor_cuda_is_imported(gpu_bundle: Path) -> None:
    script = (
        "import sys\nfrom llmc.runtime.verification import verify_bundle\n"
        f"assert not verify_bundle({str(gpu_bundle)!r}).problems\n"
        "print([name for name in sys.modules if name.partition('.')[0] in ('triton', 'cuda', 'torch')])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
