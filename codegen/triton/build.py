"""Builds Triton kernels ahead of time for an architecture, without a GPU: in parallel, cached, and checked after building."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import msgspec
from msgspec.structs import replace

from ...errors import MissingExtraError, ToolchainError
from . import binary, worker
from .kernel import Kernel
from .worker import Done, Job

WARP_SIZE = {"cuda": 32, "rocm": 64}
_MAX_WARPS = 16
_ENVIRONMENT = {
    "TRITON_INTERPRET": "0",
    "TRITON_DISABLE_LINE_INFO": "1",  # no debug sections: smaller, and the same bytes wherever it is built
    "TRITON_DEFAULT_FP_FUSION": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What binaries are for: `name` such as `sm_90` or `gfx942`, and the limits that a kernel must keep."""

    name: str
    backend: str
    shared_memory_per_block_bytes: int

    @property
    def suffix(self) -> str:
        """File name ending of a binary."""
        return "cubin" if self.backend == "cuda" else "hsaco"


class BuiltKernel(msgspec.Struct, frozen=True, kw_only=True):
    """A compiled kernel and what was read back from its binary; it may have got more warps than it asked for."""

    binary: bytes
    arch: str
    num_warps: int
    shared_bytes: int
    scratch_bytes: int
    registers: int
    spill_bytes: int
    matrix_instructions: dict[str, int]


def build(
    kernels: Iterable[Kernel],
    arch: Architecture,
    *,
    cache: Path,
    jobs: int | None = None,
    on_done: Callable[[str], object] = lambda name: None,
) -> dict[str, BuiltKernel]:
    """Compile each kernel for `arch`, `jobs` at a time (default: the CPUs); `on_done(name)` is called after each.

    A kernel that spills registers is compiled again with twice the warps, up to 16: its programs stay the same, and a thread needs
    about half as many. One that needs more shared memory than there is gets one stage less.

    Raises `MissingExtraError` without Triton and `ToolchainError` for a kernel that does not compile, or still spills registers or
    needs too much shared memory, or turns out to be for another architecture.
    """
    if importlib.util.find_spec("triton") is None:
        raise MissingExtraError(
            "GPU kernels need the package 'triton', which is not installed; run: pip install 'llmc[compile]'"
        )
    wanted = {kernel.name: kernel for kernel in kernels}
    built: dict[str, BuiltKernel] = {}
    missing: list[tuple[Kernel, Path]] = []
    for name, kernel in wanted.items():
        path = cache / "triton" / f"{_key(kernel, arch)}.kernel"
        hit = _read(path)
        if hit is None:
            missing.append((kernel, path))
        else:
            built[name] = hit
            on_done(name)
    if missing:
        num_workers = min(len(missing), jobs or os.cpu_count() or 1)
        with tempfile.TemporaryDirectory(prefix="llmc-triton-") as folder, ThreadPoolExecutor(num_workers) as pool:
            shares = [missing[index::num_workers] for index in range(num_workers)]
            for share in pool.map(lambda part: _compile(part, arch, Path(folder), on_done), shares):
                built |= share
    return {name: _checked(name, built[name], arch) for name in wanted}


def _compile(
    kernels: Sequence[tuple[Kernel, Path]], arch: Architecture, folder: Path, on_done: Callable[[str], object]
) -> dict[str, BuiltKernel]:
    """Compile in one worker process, one kernel after another."""
    built: dict[str, BuiltKernel] = {}
    environment = os.environ | _ENVIRONMENT | {"TRITON_CACHE_DIR": str(folder / "cache")}
    command = [sys.executable, "-m", worker.__name__]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            for kernel, path in kernels:
                job: Job | None = _job(kernel, arch, folder)
                while job is not None:
                    process.stdin.write(msgspec.json.encode(job) + b"\n")
                    process.stdin.flush()
                    line = process.stdout.readline()
                    if not line:
                        text = process.stderr.read().decode(errors="replace")
                        raise ToolchainError(f"the compiler of {kernel.name} for {arch.name} died: {' '.join(text.split())[-600:]}")
                    built[kernel.name] = _read_back(job, msgspec.json.decode(line, type=Done), arch)
                    job = _again(job, built[kernel.name], arch)
                _write(path, built[kernel.name])
                on_done(kernel.name)
        finally:
            process.kill()
    return built


def _job(kernel: Kernel, arch: Architecture, folder: Path) -> Job:
    return Job(
        source=kernel.source(),
        name=kernel.name,
        signature={parameter.name: parameter.type for parameter in kernel.parameters},
        arch=arch.name,
        warp_size=WARP_SIZE[arch.backend],
        num_warps=kernel.num_warps,
        num_stages=kernel.num_stages,
        output=str(folder / f"{kernel.name}-{arch.name}"),
    )


def _again(job: Job, built: BuiltKernel, arch: Architecture) -> Job | None:
    """The job with more warps or fewer stages where that may help, else None."""
    if built.spill_bytes and job.num_warps < _MAX_WARPS:
        return replace(job, num_warps=2 * job.num_warps)
    if built.shared_bytes > arch.shared_memory_per_block_bytes and job.num_stages > 1:
        return replace(job, num_stages=job.num_stages - 1)
    return None


def _read_back(job: Job, done: Done, arch: Architecture) -> BuiltKernel:
    if done.error is not None:
        raise ToolchainError(f"kernel {job.name} does not compile for {arch.name}: {done.error}")
    data = Path(f"{done.output}.bin").read_bytes()
    facts = binary.read_binary(data, job.name, Path(f"{done.output}.asm").read_text(encoding="utf-8"))
    return BuiltKernel(
        binary=data,
        arch=facts.arch,
        num_warps=job.num_warps,
        shared_bytes=done.shared_bytes,
        scratch_bytes=done.scratch_bytes,
        registers=facts.registers,
        spill_bytes=facts.spill_bytes,
        matrix_instructions=facts.matrix_instructions,
    )


def _checked(name: str, built: BuiltKernel, arch: Architecture) -> BuiltKernel:
    if built.arch != arch.name:
        raise ToolchainError(f"kernel {name} was built for {built.arch}, expected {arch.name}")
    if built.spill_bytes:
        raise ToolchainError(
            f"kernel {name} spills {built.spill_bytes} bytes of registers a thread on {arch.name}, expected 0; choose smaller "
            "tiles in its tuning table"
        )
    if built.shared_bytes > arch.shared_memory_per_block_bytes:
        raise ToolchainError(
            f"kernel {name} needs {built.shared_bytes} bytes of shared memory, but a block of {arch.name} has "
            f"{arch.shared_memory_per_block_bytes}; choose smaller tiles or fewer stages in its tuning table"
        )
    if built.scratch_bytes:
        raise ToolchainError(f"kernel {name} needs {built.scratch_bytes} bytes of global scratch, which no executor provides")
    return built


def _key(kernel: Kernel, arch: Architecture) -> str:
    """Everything that the binary depends on: the job, the compiler and how its output is read."""
    digest = hashlib.sha256(msgspec.json.encode(_job(kernel, arch, Path("."))))
    digest.update(version("triton").encode())
    for module in (worker, binary):
        assert module.__file__
        digest.update(Path(module.__file__).read_bytes())
    digest.update(msgspec.json.encode([_ENVIRONMENT, _MAX_WARPS, arch.shared_memory_per_block_bytes]))
    return digest.hexdigest()


def _read(path: Path) -> BuiltKernel | None:
    """A cache entry, or None if it is absent or damaged."""
    try:
        data = path.read_bytes()
        if hashlib.sha256(data[32:]).digest() != data[:32]:
            return None
        return msgspec.msgpack.decode(data[32:], type=BuiltKernel)
    except (OSError, msgspec.MsgspecError):
        return None


def _write(path: Path, built: BuiltKernel) -> None:
    """Write a cache entry under its name at once; a cache that cannot be written is no error."""
    data = msgspec.msgpack.encode(built)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(hashlib.sha256(data).digest() + data)
        Path(file.name).replace(path)
    except OSError:
        return
