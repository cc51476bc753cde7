"""Finds a C++ compiler and builds program libraries: one for each instruction-set level, reproducible to the byte."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Final

from ...errors import ToolchainError
from ...runtime.program import ABI_VERSION

_DIGEST: Final = hashlib.sha256().digest_size
logger = logging.getLogger("llmc.codegen")
KERNELS: Final = Path(__file__).parent / "kernels"
_EXPORTS: Final = KERNELS / "exports.cpp"

_AVX2: Final = ("-mavx2", "-mfma", "-mf16c")
_AVX512: Final = (*_AVX2, *(f"-mavx512{part}" for part in ("f", "bw", "dq", "vl", "vnni", "bf16")))
_AMX: Final = (*_AVX512, "-mamx-tile", "-mamx-int8", "-mamx-bf16")

LEVEL_FLAGS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {"portable": (), "avx2": _AVX2, "avx512": _AVX512, "amx": _AMX}
)
"""Flags of each level, lowest first. They name instruction sets, never this machine."""

_FLAGS: Final = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",  # a fused multiply-add only where a kernel asks for one: all tiles round alike
    "-fno-math-errno",
    "-w",
)
_STATIC_RUNTIME: Final = ("-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL")
_LINK_FLAGS: Final = ("-Wl,--build-id=none", "-s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiler:
    """A working C++ compiler."""

    command: tuple[str, ...]
    version: str
    """First line of `--version`."""
    machine: str
    """What it builds for, such as `x86_64-linux-gnu`."""
    openmp: bool
    """Whether it can build and link OpenMP; without it a library runs on one thread."""
    static_runtime: bool = False
    """Whether it can link its C++ runtime into the library, which then needs no such package where it is used."""

    @property
    def platform(self) -> str:
        """The machine as program.json names it, such as `x86_64-linux`."""
        return f"{self.machine.split('-')[0]}-{'linux' if 'linux' in self.machine else sys.platform}"

    @property
    def levels(self) -> tuple[str, ...]:
        """Levels it can build, lowest first."""
        x86 = self.machine.startswith(("x86_64", "amd64"))
        return tuple(LEVEL_FLAGS) if x86 else ("portable",)


def find_compiler() -> Compiler:
    """The first that works of `$CXX`, `g++`, `clang++` and the `ziglang` wheel.

    Raises:
        ToolchainError: none works; the text names what was tried and how to get one.
    """
    candidates: list[tuple[str, tuple[str, ...]]] = []
    if os.environ.get("CXX", "").strip():
        candidates.append(("$CXX", _split_command(os.environ["CXX"])))
    candidates += [("g++", ("g++",)), ("clang++", ("clang++",))]
    if importlib.util.find_spec("ziglang"):
        candidates.append(("ziglang", (sys.executable, "-m", "ziglang", "c++")))
    tried = []
    for name, command in candidates:
        program = shutil.which(command[0])
        if program is not None:  # builds run in a folder of their own, so a relative $CXX must not stay relative
            compiler = _probe((os.path.abspath(program) if os.sep in command[0] else command[0], *command[1:]))
            if compiler is not None:
                return compiler
        if name == "$CXX":
            logger.warning("CXX=%r does not compile a C++17 shared library; trying others", os.environ["CXX"])
        tried.append(f"{name} ({shlex.join(command)})" if name == "$CXX" else name)
    if not any(name == "ziglang" for name, _ in candidates):
        tried.append("ziglang")
    raise ToolchainError(
        f"no working C++17 compiler: tried {', '.join(tried)}; run `pip install ziglang`, or install g++ or clang++, "
        "or set CXX to one"
    )


def _split_command(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError:  # an unclosed quote
        return (text,)


@lru_cache(maxsize=8)
def _probe(command: tuple[str, ...]) -> Compiler | None:
    """Compiles a few lines; None if that fails."""
    source = "#include <vector>\nint main() { std::vector<int> v(1); return v[0]; }\n"
    try:
        version = subprocess.run([*command, "--version"], capture_output=True, text=True, errors="replace", timeout=60)
        machine = subprocess.run([*command, "-dumpmachine"], capture_output=True, text=True, errors="replace", timeout=60)
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "probe.cpp").write_text(source, encoding="utf-8")

            def builds(*flags: str) -> bool:
                line = [*command, "-std=c++17", "-fPIC", "-shared", *flags, "probe.cpp", "-o", "probe.so"]
                return subprocess.run(line, cwd=folder, capture_output=True, timeout=300).returncode == 0

            if version.returncode != 0 or not version.stdout.strip() or not builds():
                return None
            openmp = builds("-fopenmp")
            static_runtime = builds(*_STATIC_RUNTIME)
    except (OSError, subprocess.SubprocessError):
        return None
    return Compiler(
        command=command,
        version=version.stdout.splitlines()[0].strip(),
        machine=machine.stdout.strip() or platform.machine().lower(),
        openmp=openmp,
        static_runtime=static_runtime,
    )


def compile_library(
    source: Path | str,
    level: str,
    output: Path,
    *,
    compiler: Compiler | None = None,
    cache: Path | None = None,
) -> Path:
    """Builds `source` (a path, or the text itself) for `level` into the shared library `output`; returns `output`.

    The bytes depend on the source, the kernel headers, the flags and the compiler alone. `cache` is a folder where
    libraries are kept by a hash of these.

    Raises:
        ToolchainError: no compiler, a level that it cannot build, or source that it refuses.
    """
    compiler = compiler or find_compiler()
    if level not in LEVEL_FLAGS:
        raise ToolchainError(f"unknown instruction-set level {level!r}; levels: {', '.join(LEVEL_FLAGS)}")
    if level not in compiler.levels:
        raise ToolchainError(
            f"level {level} cannot be built for {compiler.machine}; levels there: {', '.join(compiler.levels)}"
        )
    text = source.read_text(encoding="utf-8") if isinstance(source, Path) else source
    output.parent.mkdir(parents=True, exist_ok=True)
    if cache is not None:
        data = _build(text, level, compiler, cache)
    else:
        with tempfile.TemporaryDirectory(prefix="llmc-") as folder:
            data = _build(text, level, compiler, Path(folder))
    _write_atomically(data, output)
    return output


def compile_levels(
    source: Path | str,
    folder: Path,
    *,
    levels: Iterable[str] | None = None,
    compiler: Compiler | None = None,
    cache: Path | None = None,
    jobs: int | None = None,
) -> dict[str, Path]:
    """Builds `lib<level>.so` in `folder` for each level (default: all that the compiler can build), in parallel."""
    compiler = compiler or find_compiler()
    wanted = tuple(compiler.levels if levels is None else levels)
    folder.mkdir(parents=True, exist_ok=True)

    def build(level: str) -> Path:
        return compile_library(source, level, folder / f"lib{level}.so", compiler=compiler, cache=cache)

    with ThreadPoolExecutor(max_workers=jobs or os.cpu_count() or 1) as pool:
        return dict(zip(wanted, pool.map(build, wanted), strict=True))


def _build(text: str, level: str, compiler: Compiler, cache: Path) -> bytes:
    """The library of a program. What is the same in every program (`exports.cpp`) is an object of its own."""
    flags = (*_FLAGS, *LEVEL_FLAGS[level], *(("-fopenmp",) if compiler.openmp else ()))
    exports = _cached(cache, _EXPORTS.read_text(encoding="utf-8"), "exports.o", ("-c", *flags), level, compiler, {})
    link = ("-shared", *(_LINK_FLAGS if "linux" in compiler.machine else ()))
    link += _STATIC_RUNTIME if compiler.static_runtime else ()
    return _cached(cache, text, "program.so", (*flags, *link, "exports.o"), level, compiler, {"exports.o": exports})


def _cached(
    cache: Path,
    text: str,
    output: str,
    flags: tuple[str, ...],
    level: str,
    compiler: Compiler,
    inputs: Mapping[str, bytes],
) -> bytes:
    """The result of one compiler call, made unless the cache has it whole: an entry is its SHA-256 and the bytes."""
    entry = cache / _cache_key(text, flags, compiler)
    if entry.exists():
        stored = entry.read_bytes()
        if hashlib.sha256(stored[_DIGEST:]).digest() == stored[:_DIGEST]:
            return stored[_DIGEST:]
    # Fixed names inside a fresh folder, and its own path mapped away: nothing of this machine reaches the output.
    with tempfile.TemporaryDirectory(prefix="llmc-") as name:
        folder = Path(name)
        shutil.copytree(KERNELS, folder / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "source.cpp").write_text(text, encoding="utf-8")
        for input_name, data in inputs.items():
            (folder / input_name).write_bytes(data)
        line = [*compiler.command, f"-ffile-prefix-map={folder}=.", "-Ikernels", "source.cpp", *flags, "-o", output]
        try:
            done = subprocess.run(line, cwd=folder, capture_output=True, text=True, errors="replace")
        except OSError as error:
            raise ToolchainError(f"cannot run {shlex.join(compiler.command)}: {error.strerror}") from error
        if done.returncode != 0:
            raise ToolchainError(
                f"{shlex.join(compiler.command)} ({compiler.version}) refused the {level} program: "
                f"{_first_error(done.stderr, done.returncode)}"
            )
        result = (folder / output).read_bytes()
    cache.mkdir(parents=True, exist_ok=True)
    _write_atomically(hashlib.sha256(result).digest() + result, entry)
    return result


def _first_error(stderr: str, code: int) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or [f"exit status {code} and no message"])[0]


def _cache_key(text: str, flags: tuple[str, ...], compiler: Compiler) -> str:
    parts = [str(ABI_VERSION), text, *flags, *compiler.command, compiler.version, compiler.machine]
    for header in sorted(KERNELS.glob("*.?pp")):
        parts += [header.name, header.read_text(encoding="utf-8")]
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _write_atomically(data: bytes, output: Path) -> None:
    """A reader sees the whole file or none, whoever else writes it. The folder must exist: one that an interrupted
    compile has removed is not made again by a thread that was still at work."""
    handle, name = tempfile.mkstemp(dir=output.parent, prefix=f".{output.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(name, 0o755)
        os.replace(name, output)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
