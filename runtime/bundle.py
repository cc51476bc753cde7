"""Opens a bundle: checks it in the order of docs/bundle.md and hands out nothing that was not checked first."""

from __future__ import annotations

import mmap
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Literal

from ..errors import BundleError, UsageError
from .integrity import check_hash, check_relative, locate, read_file
from .manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, Manifest, TargetEntry, decode_manifest
from .program import MAX_PROGRAM_BYTES, Program, decode_program
from .weights import WeightFile

Verify = Literal["full", "sizes"]

SHARED_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
_REQUIRED_FILES = ("config.json", "tokenizer.json")


class Bundle:
    """One target of an opened bundle.

    Hashing runs in threads from the moment the bundle is opened; an accessor waits for the hash of the one file it
    returns, and raises BundleError instead of returning bytes that differ from the manifest.
    """

    def __init__(self, root: Path, manifest: Manifest, entry: TargetEntry, verify: Verify) -> None:
        """Use `Bundle.open`; this starts the hashing of the files that the target `entry` needs."""
        self.root = root
        self.manifest = manifest
        self.entry = entry
        self.paths = {name: locate(root, name, file) for name, file in manifest.files.items()}
        self.program = self._read_program(verify)
        self._verify = verify
        self._pool = ThreadPoolExecutor(max_workers=4, thread_name_prefix="llmc-hash")
        self._contents: dict[str, Future[bytes | mmap.mmap]] = {
            name: self._pool.submit(self._load, name) for name in self._needed_files()
        }
        self._pool.shutdown(wait=False)
        self._weights: WeightFile | None = None

    @classmethod
    def open(
        cls, path: str | Path, *, target: str | None = None, verify: Verify = "full", wait: bool = True
    ) -> Bundle:
        """Open the bundle at `path` for `target`, by default the first in the manifest that this machine can run.

        `verify="sizes"` skips the hashes. With `wait=False` hashing goes on in the background: call `check()` before
        the bundle is relied on as a whole. Raises BundleError, and UsageError for a target that it does not hold.
        """
        root = Path(path)
        manifest = read_manifest(root)
        bundle = cls(root, manifest, _choose(manifest, root, target), verify)
        if wait:
            bundle.check()
        return bundle

    def check(self) -> None:
        """Wait for every hash, then check the weights against program.json; raises the first BundleError in order."""
        for content in self._contents.values():
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
        return content if isinstance(content, bytes) else content[:]

    def weight_addresses(self) -> list[int]:
        """Addresses of the weights in the order of program.json, valid while this object lives; raises BundleError."""
        if self._weights is None:
            name = self.entry.weights
            self._weights = WeightFile(self._contents[name].result(), self.root / name)
        return self._weights.addresses(self.program.weights)

    def library_path(self, level: str) -> Path:
        """The checked shared library of an instruction-set level of program.json; raises BundleError."""
        name = self._library_name(self.program.libraries[level])
        self._contents[name].result()
        return self.paths[name]

    def extra_files(self) -> list[str]:
        """Files in the folder that the manifest does not name, sorted; they are never read."""
        found = (path.relative_to(self.root).as_posix() for path in self.root.rglob("*") if not path.is_dir())
        return sorted(set(found) - set(self.manifest.files) - {MANIFEST_NAME})

    def _load(self, name: str) -> bytes | mmap.mmap:
        content = read_file(self.paths[name])
        if self._verify == "full":
            check_hash(content, self.manifest.files[name], self.root / name)
        return content

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
        data = self.paths[name].read_bytes()
        if verify == "full":
            check_hash(data, file, self.root / name)
        program = decode_program(data, str(self.root / name))
        if program.target != self.entry.name:
            raise BundleError(
                f"{self.root / name}: target is {program.target!r}, but the manifest lists it as {self.entry.name!r}"
            )
        check_machine(program.backend, program.target, self.root)
        for library in program.libraries.values():
            if self._library_name(library) not in self.manifest.files:
                raise BundleError(f"{self.root / name}: library {library[:200]!r} is not among the manifest's files")
        return program

    def _library_name(self, file: str) -> str:
        check_relative(file, str(self.root / self.entry.program))
        return str(PurePosixPath(self.entry.program).parent / file)

    def _needed_files(self) -> list[str]:
        libraries = [self._library_name(file) for file in self.program.libraries.values()]
        # Small files first: the weights take longest, and what waits for a small file should not wait for them.
        return [*(name for name in SHARED_FILES if self.has(name)), *libraries, self.entry.weights]


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


def check_machine(backend: str, target: str, root: Path) -> None:
    """Refuse a program that this machine cannot run; raises BundleError."""
    if backend != "cpu":
        raise BundleError(f"{root}: target {target!r} is for backend {backend!r}; this runtime runs 'cpu'")
    import platform

    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise BundleError(
            f"{root}: target {target!r} is for x86-64 Linux; this machine is {platform.machine()} {sys.platform}"
        )


def _choose(manifest: Manifest, root: Path, target: str | None) -> TargetEntry:
    names = [entry.name for entry in manifest.targets]
    if target is None:
        # A name begins with its device; the program's own backend is checked again once it is read.
        runnable = [entry for entry in manifest.targets if entry.name.startswith("cpu-")]
        if not runnable:
            raise BundleError(f"{root}: no target for this machine; it holds {', '.join(names)}: compile for a cpu target")
        return runnable[0]
    if target not in names:
        raise UsageError(f"{root}: no target {target!r}; the bundle holds {', '.join(names)}")
    return manifest.targets[names.index(target)]
