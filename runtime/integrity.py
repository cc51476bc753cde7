"""Keeps a bundle's paths inside the bundle and compares its bytes with the manifest."""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
from pathlib import Path

from ..errors import BundleError
from .manifest import FileEntry

_MAP_FROM_BYTES = 8 << 20


def check_relative(path: str, where: str) -> None:
    """Refuse a manifest path that is absolute or holds `..`, a backslash or an empty part; raises BundleError."""
    parts = path.split("/")
    if "\\" in path or "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise BundleError(
            f"{where}: path {path[:200]!r} may not be absolute or hold '.', '..', a backslash or an empty part; "
            "do not trust this bundle"
        )


def locate(root: Path, path: str, entry: FileEntry) -> Path:
    """The file `path` of the bundle at `root`, checked to be a regular file inside it and of the manifest's size.

    Raises BundleError.
    """
    check_relative(path, str(root / "manifest.json"))
    full = root / path
    try:
        real = full.resolve(strict=True)
        status = real.stat()
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or "a loop of links"
        raise BundleError(f"{full}: {reason}; the manifest names it with {entry.size} bytes: copy the bundle again") from None
    if not real.is_relative_to(root.resolve()):
        raise BundleError(f"{full}: a link that leads out of the bundle, to {real}; do not trust this bundle")
    if not stat.S_ISREG(status.st_mode):
        raise BundleError(f"{full}: not a regular file; do not trust this bundle")
    if status.st_size != entry.size:
        raise BundleError(f"{full}: {status.st_size} bytes, but the manifest says {entry.size}; copy the bundle again")
    return real


def check_hash(data: bytes | mmap.mmap, entry: FileEntry, path: Path) -> None:
    """Compare the SHA-256 of `data` with the manifest's; raises BundleError.

    One call on the whole buffer, because hashlib gives up the interpreter lock only for its duration.
    """
    found = hashlib.sha256(data).hexdigest()
    if found != entry.sha256:
        raise BundleError(
            f"{path}: SHA-256 is {found}, but the manifest says {entry.sha256}; the file was changed or damaged: "
            "copy the bundle again"
        )


def read_file(path: Path, *, mapped: bool | None = None) -> bytes | mmap.mmap:
    """The bytes of a file, mapped read-only if `mapped`, so that they cost page cache and not memory.

    By default large files are mapped. An empty file cannot be.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0 or not (size >= _MAP_FROM_BYTES if mapped is None else mapped):
            return file.read()
        return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)


def hash_file(path: Path) -> FileEntry:
    """Size and SHA-256 of a file, as the manifest records them."""
    data = read_file(path)
    return FileEntry(size=len(data), sha256=hashlib.sha256(data).hexdigest())
