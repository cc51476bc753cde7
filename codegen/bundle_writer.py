"""Writes a bundle under a temporary name and renames it when it is complete, so that a half-written one never exists."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import secrets
import shutil
from pathlib import Path
from types import TracebackType

import numpy as np

from ..errors import BundleError, UsageError
from ..formats.floats import Array
from ..runtime.bundle import read_manifest
from ..runtime.integrity import hash_file
from ..runtime.manifest import MANIFEST_NAME, SCHEMA_VERSION, Manifest, ModelFacts, TargetEntry, encode_manifest
from ..runtime.program import WeightSpec
from ..runtime.weights import tensor_bytes

MIN_RUNTIME = "0.1.0"
_PAGE = 4096
_OLD = "-old"


def check_output(output: Path) -> None:
    """Raises `UsageError` where a bundle cannot be written to `output`, or would replace more than a bundle."""
    if os.path.lexists(output):
        try:
            manifest = read_manifest(output)
        except BundleError as error:
            raise UsageError(f"{output}: exists and is not a bundle ({error}); choose another output or remove it") from None
        found = {path.relative_to(output).as_posix() for path in output.rglob("*") if not path.is_dir()}
        foreign = sorted(found - set(manifest.files) - {MANIFEST_NAME})
        if foreign:
            raise UsageError(f"{output}: holds {foreign[0]!r}, which is not part of the bundle there; move it away first")
    folder = next(path for path in output.absolute().parents if path.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(f"{output}: {folder} is not a folder that can be written to; choose another output")


class BundleWriter:
    """A folder that becomes the bundle on `publish`; leaving the `with` block without it removes everything.

    An existing bundle at `output` is replaced only by a complete one. Anything else there is an error.
    """

    def __init__(self, output: Path) -> None:
        check_output(output)
        self.output = output.resolve()  # through a link, the bundle it leads to is the one replaced
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self._remove_abandoned()
        self.root = self.output.with_name(f"{self._prefix}{os.getpid()}-{secrets.token_hex(4)}")

    @property
    def _prefix(self) -> str:
        return f".{self.output.name}.partial-"

    def __enter__(self) -> BundleWriter:
        try:  # the name is known before the folder is there, so that an interrupt at any point leaves nothing behind
            self.root.mkdir(mode=0o700)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._remove()

    def _remove(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)

    def folder(self, name: str) -> Path:
        """A folder of the bundle, made if absent."""
        path = self.root / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def write_json(self, name: str, value: object) -> None:
        """A JSON file with sorted keys."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")

    def seal(self, *, model: ModelFacts, toolchain: dict[str, str], targets: list[TargetEntry]) -> None:
        """Write the manifest over all files there are: what is in `root` can be loaded now."""
        paths = sorted(path for path in self.root.rglob("*") if path.is_file() and path.name != MANIFEST_NAME)
        manifest = Manifest(
            schema_version=SCHEMA_VERSION,
            min_runtime=MIN_RUNTIME,
            model=model,
            toolchain=toolchain,
            targets=targets,
            files={path.relative_to(self.root).as_posix(): hash_file(path) for path in paths},
        )
        (self.root / MANIFEST_NAME).write_bytes(encode_manifest(manifest))

    def publish(self) -> None:
        """Move the sealed bundle to its name."""
        self.root.chmod(0o755)
        _replace(self.root, self.output)

    def _remove_abandoned(self) -> None:
        """Put back the bundle that a compile killed between two renames took away; remove what else killed ones left."""
        for path in sorted(
            self.output.parent.glob(f"{self._prefix}*"), reverse=True
        ):  # `-old` before the folder it is named after
            owner = path.name.removeprefix(self._prefix).split("-")[0]
            if not owner.isdigit() or Path(f"/proc/{owner}").exists():
                continue
            if path.name.endswith(_OLD) and not self.output.exists():
                path.rename(self.output)
            else:
                shutil.rmtree(path, ignore_errors=True)


def _replace(new: Path, output: Path) -> None:
    """Put `new` at `output`, atomically where the system can exchange two names, else with the old one kept until it is done."""
    if not output.exists():
        new.rename(output)
        return
    old = new.with_name(f"{new.name}{_OLD}")
    if _exchange(new, output):
        new.rename(old)
    else:
        try:
            output.rename(old)
            new.rename(output)
        except BaseException:
            if old.exists() and not output.exists():
                old.rename(output)
            raise
    shutil.rmtree(old, ignore_errors=True)


def _exchange(a: Path, b: Path) -> bool:
    """Swap two names in one step (Linux renameat2 with RENAME_EXCHANGE); False where that is not to be had."""
    try:
        renameat2 = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError):
        return False
    here, exchange = -100, 2
    return bool(renameat2(here, os.fsencode(a), here, os.fsencode(b), exchange) == 0)


class SafetensorsWriter:
    """Streams tensors to a safetensors file: the header first, then each tensor at its place, in any order.

    The header is padded with spaces to a multiple of 4096 bytes, so the data starts on a page.
    """

    def __init__(self, path: Path, specs: list[WeightSpec]) -> None:
        """Write the header for `specs`, whose data will lie in their order."""
        header: dict[str, object] = {}
        end = 0
        for spec in specs:
            start, end = end, end + tensor_bytes(spec.dtype, spec.shape)
            header[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(len(text) + 8) % _PAGE)
        starts = itertools.accumulate((tensor_bytes(spec.dtype, spec.shape) for spec in specs), initial=8 + len(text))
        self._starts = {spec.name: start for spec, start in zip(specs, starts, strict=False)}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little"))
        self._file.write(text)

    def write(self, spec: WeightSpec, tensor: Array) -> None:
        """Write one tensor."""
        data = np.ascontiguousarray(tensor)
        if data.nbytes != tensor_bytes(spec.dtype, spec.shape):
            raise AssertionError(
                f"{spec.name}: packed {data.nbytes} bytes, its shape {spec.shape} says {tensor_bytes(spec.dtype, spec.shape)}"
            )
        self._file.seek(self._starts.pop(spec.name))
        data.tofile(self._file)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()
        if kind is None and self._starts:
            raise AssertionError(
                f"{self._file.name}: {len(self._starts)} tensors were not written, first {next(iter(self._starts))}"
            )
