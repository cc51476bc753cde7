"""Opens a bundle: checks it in the order of docs/bundle.md and hands out nothing that was not checked first."""

from __future__ import annotations

import mmap
import os
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Literal

import msgspec

from ..errors import BundleError, UsageError
from .integrity import check_hash, check_relative, locate, read_file
from .manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, Manifest, TargetEntry, decode_manifest
from .program import MAX_PROGRAM_BYTES, Program, decode_program
from .tokenizer_index import INDEX_NAME
from .weights import WeightFile

Verify = Literal["full", "sizes"]

SHARED_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    INDEX_NAME,
)
_BACKENDS = ("cpu",)
_REQUIRED_FILES = ("config.json",)


class Bundle:
    """One target of an opened bundle.

    Hashing runs in threads from the moment the bundle is opened; an accessor waits for the hash of the one file it
    returns, and raises BundleError instead of returning bytes that differ from the manifest.
    """

    def __init__(self, root: Path, manifest: Manifest, entry: TargetEntry, verify: Verify) -> None:
        """Use `Bundle.open`, which chooses `entry`; this starts the hashing of the files that the target needs."""
        self.root = root
        self.manifest = manifest
        self.entry = entry
        self.paths = {name: locate(root, name, file) for name, file in manifest.files.items()}
        self.program = self._read_program(verify)
        self._verify = verify
        self._pool = ThreadPoolExecutor(max_workers=4, thread_name_prefix="llmc-hash")
        # With an index the tokenizer itself is not read unless it turns out to be needed.
        unread = {"tokenizer.json"} if self.has(INDEX_NAME) else set()
        self._contents: dict[str, Future[bytes | mmap.mmap]] = {
            name: self._pool.submit(self._load, name, keep=name not in unread) for name in self._needed_files()
        }
        self._pool.shutdown(wait=False)
        self._weights: WeightFile | None = None

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        target: str | None = None,
        verify: Verify = "full",
        wait: bool = True,
        any_machine: bool = False,
    ) -> Bundle:
        """Open the bundle at `path` for `target`, by default the first in the manifest that runs here.

        `verify="sizes"` skips the hashes. With `wait=False` hashing goes on in the background: call `check()` before
        the bundle is relied on as a whole. With `any_machine` a target may be one that cannot run here. Raises
        BundleError, and UsageError for a target that the bundle does not hold.
        """
        root = Path(path)
        manifest = read_manifest(root)
        bundle = cls(root, manifest, _choose(manifest, root, target), verify)
        if not any_machine:
            check_machine(bundle.program, bundle.entry.name, root)
        if wait:
            bundle.check()
        return bundle

    def check(self) -> None:
        """Wait for every hash, then check the weights against program.json; raises the first BundleError in order."""
        for content in list(self._contents.values()):
            content.result()
        self.weight_addresses()

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

    def weight_addresses(self) -> list[int]:
        """Addresses of the weights in program.json's order, valid while this object lives; raises BundleError."""
        if self._weights is None:
            name = self.entry.weights
            self._weights = WeightFile(self._contents[name].result(), self.root / name)
        return self._weights.addresses(self.program.weights)

    def library(self, level: str) -> tuple[Path, bytes]:
        """Path and checked bytes of the shared library of an instruction-set level of program.json; raises BundleError."""
        name = self._library_name(self.program.libraries[level])
        return self.paths[name], self.read(name)

    def _load(self, name: str, *, keep: bool = True) -> bytes | mmap.mmap:
        try:
            content = read_file(self.paths[name], mapped=not keep or name in (self.entry.weights, INDEX_NAME))
        except OSError as error:
            raise BundleError(f"{self.root / name}: {error.strerror}; check its permissions") from None
        if self._verify == "full":
            check_hash(content, self.manifest.files[name], self.root / name)
        return content if keep else b""

    def _read_program(self, verify: Verify) -> Program:
        name = self.entry.program
        for needed in (name, self.entry.weights, *_REQUIRED_FILES):
            if needed not in self.manifest.files:
                raise BundleError(
                    f"{self.root / MANIFEST_NAME}: target {self.entry.name!r} needs {needed[:200]!r}, which is not "
                    "in files; compile the bundle again"
                )
        file = self.manifest.files[name]
        if file.size > MAX_PROGRAM_BYTES:
            raise BundleError(f"{self.root / name}: {file.size} bytes; expected at most {MAX_PROGRAM_BYTES}")
        try:
            data = self.paths[name].read_bytes()
        except OSError as error:
            raise BundleError(f"{self.root / name}: {error.strerror}; check its permissions") from None
        if verify == "full":
            check_hash(data, file, self.root / name)
        program = decode_program(data, str(self.root / name))
        if program.target != self.entry.name:
            raise BundleError(
                f"{self.root / name}: target is {program.target!r}, but the manifest lists it as {self.entry.name!r}"
            )
        for library in program.libraries.values():
            if self._library_name(library) not in self.manifest.files:
                raise BundleError(f"{self.root / name}: library {library[:200]!r} is not among the manifest's files")
        return program

    def _library_name(self, file: str) -> str:
        check_relative(file, str(self.root / self.entry.program))
        return str(PurePosixPath(self.entry.program).parent / file)

    def _needed_files(self) -> list[str]:
        libraries = [self._library_name(file) for file in self.program.libraries.values()]
        # The weights first: they take longest, and must be under way before the caller keeps the interpreter busy.
        return [self.entry.weights, *(name for name in SHARED_FILES if self.has(name)), *libraries]


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


class _Machine(msgspec.Struct):
    backend: str
    machine: str


def check_machine(program: Program | _Machine, target: str, root: Path) -> None:
    """Refuse a program that this machine cannot run; raises BundleError."""
    if program.backend not in _BACKENDS:
        raise BundleError(
            f"{root}: target {target!r} is for backend {program.backend!r}; this runtime runs {', '.join(_BACKENDS)}: "
            "compile for a target of those"
        )
    # platform.machine() would do, but importing platform costs more than the rest of this function's module.
    here = f"{os.uname().machine if hasattr(os, 'uname') else 'unknown'}-{sys.platform}"
    if program.machine != here:
        raise BundleError(
            f"{root}: target {target!r} is for {program.machine}; this machine is {here}: compile the model on such a one"
        )


def _choose(manifest: Manifest, root: Path, target: str | None) -> TargetEntry:
    names = [entry.name for entry in manifest.targets]
    if target is not None:
        if target not in names:
            raise UsageError(f"{root}: no target {target!r}; the bundle holds {', '.join(names)}")
        return manifest.targets[names.index(target)]
    if len(names) == 1:
        return manifest.targets[0]
    refusals = []
    for entry in manifest.targets:
        try:
            if entry.program not in manifest.files:
                raise BundleError(f"{root}: target {entry.name!r}: {entry.program[:200]!r} is not in files")
            data = locate(root, entry.program, manifest.files[entry.program]).read_bytes()
            check_machine(msgspec.json.decode(data, type=_Machine), entry.name, root)
        except (BundleError, OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            refusals.append(str(error))
        else:
            return entry
    raise BundleError(f"{root}: no target for this machine; it holds {', '.join(names)}; the first: {refusals[0]}")
