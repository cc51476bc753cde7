"""Opens a bundle: checks it in the order of docs/bundle.md and hands out nothing that was not checked first."""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Literal

from ..errors import BundleError, UsageError
from .devices import survey_cuda, this_processor
from .integrity import check_hash, check_relative, locate, read_file
from .manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, Manifest, TargetEntry, decode_manifest
from .program import MAX_PROGRAM_BYTES, CpuProgram, GpuProgram, decode_program
from .selection import Candidate, Choice, ExecutorName, Here, choose
from .tokenizer_index import INDEX_NAME
from .weights import WeightFile, find_weights

Verify = Literal["full", "sizes"]

SHARED_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    INDEX_NAME,
)
_REQUIRED_FILES = ("config.json",)


class Bundle:
    """One target of an opened bundle.

    Hashing runs in threads from the moment the bundle is opened; an accessor waits for the hash of the one file it
    returns, and raises BundleError instead of returning bytes that differ from the manifest.
    """

    def __init__(
        self,
        root: Path,
        manifest: Manifest,
        entry: TargetEntry,
        program: CpuProgram | GpuProgram,
        verify: Verify,
        choice: Choice | None = None,
    ) -> None:
        """Use `Bundle.open`, which chooses `entry`; this starts the hashing of the files that the target needs."""
        self.root = root
        self.manifest = manifest
        self.entry = entry
        self.program = program
        self.choice = choice
        self.paths = {name: locate(root, name, file) for name, file in manifest.files.items()}
        self._verify = verify
        self._pool = ThreadPoolExecutor(max_workers=4, thread_name_prefix="llmc-hash")
        # With an index the tokenizer itself is not read unless it turns out to be needed.
        unread = {"tokenizer.json"} if self.has(INDEX_NAME) else set()
        self._contents: dict[str, Future[bytes | mmap.mmap]] = {
            name: self._pool.submit(self._load, name, keep=name not in unread) for name in self._needed_files()
        }
        self._pool.shutdown(wait=False)
        self._weights: list[WeightFile] | None = None

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        target: str | None = None,
        executor: ExecutorName = "auto",
        verify: Verify = "full",
        wait: bool = True,
    ) -> Bundle:
        """Open the bundle at `path` for `target`, by default the best that `executor` runs on this machine.

        `verify="sizes"` skips the hashes. With `wait=False` hashing goes on in the background: call `check()` before
        the bundle is relied on as a whole. Raises BundleError, UsageError for a target that the bundle does not hold,
        and MissingExtraError.
        """
        root = Path(path)
        manifest = read_manifest(root)
        entries = {entry.name: entry for entry in manifest.targets}
        if target is not None and target not in entries:
            raise UsageError(f"{root}: no target {target!r}; the bundle holds {', '.join(entries)}")
        programs: dict[str, CpuProgram | GpuProgram] = {}
        candidates = []
        for name in entries if target is None else [target]:
            try:
                programs[name] = read_program(root, manifest, entries[name], verify)
            except BundleError as error:
                candidates.append(Candidate(target=name, unreadable=error))
            else:
                candidates.append(Candidate(target=name, backend=programs[name].backend, machine=programs[name].machine))
        here = Here(processor=this_processor(), survey_cuda=survey_cuda)
        choice = choose(candidates, executor, here, str(root))
        bundle = cls(root, manifest, entries[choice.target], programs[choice.target], verify, choice)
        if wait:
            bundle.check()
        return bundle

    def check(self) -> None:
        """Wait for every hash, then check the weights against program.json; raises the first BundleError in order."""
        for content in list(self._contents.values()):
            content.result()
        self.weight_places()

    def has(self, name: str) -> bool:
        """Whether the manifest names the file."""
        return name in self.manifest.files

    def read(self, name: str) -> bytes:
        """The checked bytes of one of the small files, such as `config.json`; raises BundleError."""
        if name not in self._contents:
            raise BundleError(f"{self.root / name}: the manifest does not name it; compile the bundle again")
        content = self._contents[name].result()
        assert isinstance(content, bytes)  # only the weights are mapped
        return content

    def take(self, name: str) -> bytes | mmap.mmap:
        """The checked bytes of a large file, not kept: a second call reads and checks the file again."""
        content = self._contents.pop(name, None)
        return (content.result() if content is not None else None) or self._load(name)

    def weight_files(self) -> list[WeightFile]:
        """The target's weight files, mapped as long as this object lives; raises BundleError."""
        if self._weights is None:
            self._weights = [WeightFile(self._contents[name].result(), self.root / name) for name in self.entry.weights]
        return self._weights

    def weight_places(self) -> list[tuple[int, int]]:
        """`(index into weight_files, offset in the file)` of each weight in program.json's order; raises BundleError."""
        return find_weights(self.weight_files(), self.program.weights)

    def weight_addresses(self) -> list[int]:
        """Addresses of the weights in program.json's order, valid while this object lives; raises BundleError."""
        files = self.weight_files()
        return [files[index].address + offset for index, offset in self.weight_places()]

    def beside_program(self, file: str) -> tuple[Path, bytes]:
        """Path and checked bytes of a file that program.json names: a library, or a kernel's source or binary.

        Raises BundleError.
        """
        name = _beside(self.entry, file)
        return self.paths[name], self.read(name)

    def _load(self, name: str, *, keep: bool = True) -> bytes | mmap.mmap:
        try:
            content = read_file(self.paths[name], mapped=not keep or name in (*self.entry.weights, INDEX_NAME))
        except OSError as error:
            raise BundleError(f"{self.root / name}: {error.strerror}; check its permissions") from None
        if self._verify == "full":
            check_hash(content, self.manifest.files[name], self.root / name)
        return content if keep else b""

    def _needed_files(self) -> list[str]:
        # The weights first: they take longest, and must be under way before the caller keeps the interpreter busy.
        beside = [_beside(self.entry, file) for file in _files_of(self.program)]
        return list(dict.fromkeys([*self.entry.weights, *(name for name in SHARED_FILES if self.has(name)), *beside]))


def read_manifest(root: Path) -> Manifest:
    """The manifest of the bundle at `root`, checked for schema, versions and paths; raises BundleError."""
    path = root / MANIFEST_NAME
    if not root.is_dir():
        found = "a file" if root.exists() else "nothing"
        raise BundleError(f"{root}: not a bundle: found {found} there, expected the folder that 'llmc compile' wrote")
    try:
        if not path.is_file():
            raise BundleError(f"{root}: not a bundle: it holds no {MANIFEST_NAME}; expected the output of 'llmc compile'")
        size = path.stat().st_size
        if size > MAX_MANIFEST_BYTES:
            raise BundleError(f"{path}: {size} bytes; expected at most {MAX_MANIFEST_BYTES}")
        data = path.read_bytes()
    except OSError as error:
        raise BundleError(f"{path}: {error.strerror}; check its permissions") from None
    manifest = decode_manifest(data, str(path))
    for name in manifest.files:
        check_relative(name, str(path))
    return manifest


def read_program(root: Path, manifest: Manifest, entry: TargetEntry, verify: Verify) -> CpuProgram | GpuProgram:
    """The checked program.json of a target, all of whose files the manifest is found to name; raises BundleError."""
    where = root / entry.program
    for needed in (entry.program, *entry.weights, *_REQUIRED_FILES):
        if needed not in manifest.files:
            raise BundleError(
                f"{root / MANIFEST_NAME}: target {entry.name!r} needs {needed[:200]!r}, which is not in files; "
                "compile the bundle again"
            )
    if len(set(entry.weights)) != len(entry.weights):
        raise BundleError(f"{root / MANIFEST_NAME}: target {entry.name!r} lists a weight file twice; compile the bundle again")
    file = manifest.files[entry.program]
    if file.size > MAX_PROGRAM_BYTES:
        raise BundleError(f"{where}: {file.size} bytes; expected at most {MAX_PROGRAM_BYTES}")
    try:
        data = locate(root, entry.program, file).read_bytes()
    except OSError as error:
        raise BundleError(f"{where}: {error.strerror}; check its permissions") from None
    if verify == "full":
        check_hash(data, file, where)
    program = decode_program(data, str(where))
    if program.target != entry.name:
        raise BundleError(f"{where}: target is {program.target!r}, but the manifest lists it as {entry.name!r}")
    for name in _files_of(program):
        check_relative(name, str(where))
        if _beside(entry, name) not in manifest.files:
            raise BundleError(f"{where}: {name[:200]!r} is not among the manifest's files; compile the bundle again")
    return program


def _files_of(program: CpuProgram | GpuProgram) -> Iterable[str]:
    """The files that program.json names, relative to its own folder."""
    if isinstance(program, CpuProgram):
        return program.libraries.values()
    return (file for kernel in program.kernels.values() for file in (kernel.source, kernel.binary))


def _beside(entry: TargetEntry, file: str) -> str:
    return str(PurePosixPath(entry.program).parent / file)
