"""Checks everything in a bundle and lists every violation, where a load stops at the first."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import LlmcError
from .binary import binary_arch, check_binary
from .bundle import Bundle, read_manifest, read_program
from .devices import this_processor
from .generation import read_chat_template, read_default_params, read_end_ids, read_tokenizer
from .integrity import check_hash, locate, read_file
from .manifest import MANIFEST_NAME, FileEntry, Manifest, TargetEntry
from .program import GpuProgram, KernelEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was looked at; `problem` is None if it is as it should be."""

    subject: str
    detail: str
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFacts:
    """A compiled kernel of a target: `arch` is read from its binary, the rest is what the compiler has recorded."""

    target: str
    name: str
    arch: str
    shared_bytes: int
    registers: int
    spill_bytes: int
    matrix_instructions: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All checks of a bundle. Files that the manifest does not name are no problem: they are never read."""

    checks: list[Check]
    extra_files: list[str]
    kernels: list[KernelFacts] = field(default_factory=list)

    @property
    def problems(self) -> list[Check]:
        """The checks that failed."""
        return [check for check in self.checks if check.problem is not None]


def verify_bundle(path: str | Path) -> Report:
    """Check all files and all targets of the bundle at `path`; raises BundleError if it has no valid manifest.

    Needs neither a GPU nor Triton.
    """
    root = Path(path)
    manifest = read_manifest(root)
    with ThreadPoolExecutor(max_workers=4) as pool:
        checks = list(pool.map(lambda item: _check_file(root, *item), sorted(manifest.files.items())))
    kernels: list[KernelFacts] = []
    for entry in manifest.targets:
        checks += _check_target(root, manifest, entry, kernels)
    found = (file.relative_to(root).as_posix() for file in root.rglob("*") if not file.is_dir())
    extra_files = sorted(set(found) - set(manifest.files) - {MANIFEST_NAME})
    return Report(checks=checks, extra_files=extra_files, kernels=kernels)


def _check_file(root: Path, name: str, entry: FileEntry) -> Check:
    detail = f"{entry.size} bytes"
    try:
        check_hash(read_file(locate(root, name, entry)), entry, root / name)
    except (LlmcError, OSError) as error:
        return Check(subject=name, detail=detail, problem=str(error))
    return Check(subject=name, detail=detail)


def _check_target(root: Path, manifest: Manifest, entry: TargetEntry, kernels: list[KernelFacts]) -> list[Check]:
    """The program, weights and tokenizer of one target, and its kernels or, if this machine can run it, its library."""
    name, detail = entry.name, "not run here"
    try:
        bundle = Bundle(root, manifest, entry, read_program(root, manifest, entry, "full"), "full")
        bundle.check()
        tokenizer = read_tokenizer(bundle)
        read_chat_template(bundle, tokenizer)
        read_default_params(bundle)
        read_end_ids(bundle, tokenizer)
        if isinstance(bundle.program, GpuProgram):
            return _check_kernels(bundle, bundle.program, kernels)
        if bundle.program.machine == this_processor():
            from .executor.cpu import open_best_library

            _, level = open_best_library(bundle, None)
            detail = f"runs here, level {level}"
    except LlmcError as error:
        return [Check(subject=name, detail=detail, problem=str(error))]
    return [Check(subject=name, detail=detail)]


def _check_kernels(bundle: Bundle, program: GpuProgram, kernels: list[KernelFacts]) -> list[Check]:
    """One line for the target, and one for each kernel that is not as it should be."""
    failed: list[Check] = []
    for name, kernel in program.kernels.items():
        path, binary = bundle.beside_program(kernel.binary)
        arch = "unknown"
        try:
            arch = binary_arch(binary, str(path))
            check_binary(binary, program.machine, name, str(path))
            problem = (
                f"{path}: spills {kernel.spill_bytes} bytes of registers a thread, expected 0" if kernel.spill_bytes else None
            )
        except LlmcError as error:
            problem = str(error)
        kernels.append(_facts(program.target, name, arch, kernel))
        if problem is not None:
            failed.append(Check(subject=f"{program.target} {name}", detail="kernel", problem=problem))
    most_shared = max((kernel.shared_bytes for kernel in program.kernels.values()), default=0)
    most_registers = max((kernel.registers for kernel in program.kernels.values()), default=0)
    detail = (
        f"{len(program.kernels)} kernels for {program.machine}, at most {most_shared} bytes of shared memory and {most_registers} "
        f"registers, {'no spills' if not failed else f'{len(failed)} refused'}; not run here"
    )
    return [Check(subject=program.target, detail=detail), *failed]


def _facts(target: str, name: str, arch: str, kernel: KernelEntry) -> KernelFacts:
    return KernelFacts(
        target=target,
        name=name,
        arch=arch,
        shared_bytes=kernel.shared_bytes,
        registers=kernel.registers,
        spill_bytes=kernel.spill_bytes,
        matrix_instructions=kernel.matrix_instructions,
    )
