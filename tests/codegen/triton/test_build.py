"""Building ahead of time: what the binaries say, refusals, and a cache that is never trusted blindly."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from llmc.codegen.triton import build as build_module
from llmc.codegen.triton.binary import read_binary
from llmc.codegen.triton.build import Architecture, build
from llmc.codegen.triton.kernel import Kernel, Parameter
from llmc.errors import ToolchainError

_HEAD = "import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef {name}({parameters}):\n"
_COPY = """    i = tl.arange(0, 128)
    tl.store(y + i, tl.load(x + i) * 2)
"""
_DOT = """    i = tl.arange(0, 128)
    a = tl.load(x + i[:, None] * 128 + i[None, :])
    tl.store(y + i[:, None] * 128 + i[None, :], tl.dot(a, a))
"""
_LOOP = """    i = tl.arange(0, 128)
    acc = tl.zeros((128, 128), tl.float32)
    for step in range(0, 64):
        a = tl.load(x + i[:, None] * 8192 + step * 128 + i[None, :])
        acc = tl.dot(a, tl.load(x + i[:, None] * 128 + step * 16384 + i[None, :]), acc)
    tl.store(y + i[:, None] * 128 + i[None, :], acc)
"""
_TOO_WIDE = """    i = tl.arange(0, 16384)
    a = tl.load(x + i).to(tl.float32)
    total = a
    for step in range(1, 40):
        b = tl.load(x + step * 16384 + i).to(tl.float32)
        total += tl.sum(b, 0) * a + tl.flip(b) * tl.sum(total, 0)
        a = b * a + tl.flip(a)
    tl.store(y + i, total)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written(Kernel):
    """A kernel whose source is written out, not made from a template."""

    body: str = _COPY

    def source(self) -> str:
        return _HEAD.format(name=self.name, parameters=", ".join(p.name for p in self.parameters)) + self.body


def _kernel(body: str = _COPY, name: str = "example", **changes: object) -> Kernel:
    parameters = (Parameter(name="x", type="*bf16"), Parameter(name="y", type="*fp32"))
    kernel = _Written(name=name, template="", settings={}, parameters=parameters, body=body)
    return replace(kernel, **changes)  # type: ignore[arg-type]


SM90 = Architecture(name="sm_90", backend="cuda", shared_memory_per_block_bytes=232448)


@pytest.mark.parametrize(
    ("arch", "instruction"),
    [("sm_80", "HMMA"), ("sm_89", "HMMA"), ("sm_90", "HGMMA"), ("sm_100", "UTCHMMA"), ("gfx942", "v_mfma_f32_32x32x8_bf16")],
)
def test_the_binary_is_for_the_architecture(arch: str, instruction: str, tmp_path: Path) -> None:
    backend = "rocm" if arch.startswith("gfx") else "cuda"
    architecture = Architecture(name=arch, backend=backend, shared_memory_per_block_bytes=65536)
    built = build([_kernel(_DOT, num_warps=8)], architecture, cache=tmp_path)["example"]
    assert built.arch == arch
    assert built.matrix_instructions[instruction] > 0
    assert 0 < built.registers <= 512
    assert built.spill_bytes == 0
    assert built.shared_bytes <= 65536


def test_the_same_source_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second = (build([_kernel(_DOT)], SM90, cache=tmp_path / name)["example"].binary for name in ("a", "b"))
    assert first == second
    assert str(tmp_path).encode() not in first


def test_the_cache_is_used_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    first = build([_kernel(), _kernel(name="other")], SM90, cache=tmp_path, on_done=done.append)
    assert sorted(done) == ["example", "other"]
    entries = sorted((tmp_path / "triton").iterdir())
    assert len(entries) == 2
    data = entries[0].read_bytes()
    entries[0].write_bytes(data[:-1] + bytes([data[-1] ^ 1]))  # damaged
    monkeypatch.setattr(build_module, "_write", lambda path, built: path.with_suffix(".again").touch())
    assert build([_kernel(), _kernel(name="other")], SM90, cache=tmp_path) == first
    assert [p.stem for p in (tmp_path / "triton").glob("*.again")] == [entries[0].stem]  # that one alone was built again


def test_an_unwritable_cache_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "triton").write_text("a file is in the way")
    assert build([_kernel()], SM90, cache=tmp_path)["example"].arch == "sm_90"


@pytest.mark.parametrize(
    ("kernel", "arch", "message"),
    [
        (_kernel("    tl.store(y, tl.load(x) + nowhere)\n"), SM90, "kernel example does not compile for sm_90: .*nowhere"),
        (_kernel("    if x\n"), SM90, "kernel example does not compile for sm_90: .*expected ':'"),
        (_kernel(_DOT), replace(SM90, shared_memory_per_block_bytes=1024), "bytes of shared memory, but a block of sm_90 has 1024"),
        (_kernel(_TOO_WIDE), SM90, r"example spills \d+ bytes of registers a thread on sm_90, expected 0"),
    ],
    ids=["unknown name", "syntax", "shared memory", "spills"],
)
def test_refusals_are_one_sentence(kernel: Kernel, arch: Architecture, message: str, tmp_path: Path) -> None:
    with pytest.raises(ToolchainError, match=message) as caught:
        build([kernel], arch, cache=tmp_path)
    assert "\n" not in str(caught.value)


def test_a_kernel_that_spills_gets_more_warps(tmp_path: Path) -> None:
    built = build([_kernel(_LOOP, num_warps=1)], replace(SM90, name="sm_80"), cache=tmp_path)["example"]
    assert built.num_warps > 1
    assert built.spill_bytes == 0


def test_a_kernel_that_needs_too_much_shared_memory_gets_fewer_stages(tmp_path: Path) -> None:
    built = build([_kernel(_LOOP, num_warps=8, num_stages=5)], SM90, cache=tmp_path)["example"]
    assert 65536 < built.shared_bytes <= SM90.shared_memory_per_block_bytes


def test_a_binary_for_another_architecture_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the compiler had built for what it found in the machine, not for what it was told."""
    honest = build_module._job
    monkeypatch.setattr(build_module, "_job", lambda kernel, arch, folder: honest(kernel, replace(arch, name="sm_89"), folder))
    with pytest.raises(ToolchainError, match="kernel example was built for sm_89, expected sm_90"):
        build([_kernel()], SM90, cache=tmp_path)


@pytest.mark.parametrize("data", [b"", b"\x7fELF", b"not an ELF at all", bytes(64)])
def test_what_is_no_kernel_binary(data: bytes) -> None:
    with pytest.raises(ToolchainError, match="x: the compiler's output is"):
        read_binary(data, "x", "")
