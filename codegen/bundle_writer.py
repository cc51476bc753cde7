"""Writes a bundle under a temporary name and renames it when it is complete, so that a half-written one never exists."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

import numpy as np

from ..errors import UsageError
from ..runtime.integrity import hash_file
from ..runtime.manifest import MANIFEST_NAME, SCHEMA_VERSION, Manifest, ModelFacts, TargetEntry, encode_manifest
from ..runtime.program import WeightSpec
from .cpu.packing import Array
from .cpu.weight_layout import spec_bytes

MIN_RUNTIME = "0.1.0"
_PAGE = 4096


def check_output(output: Path) -> None:
    """Raises `UsageError` where a bundle could not be written to `output`."""
    if output.exists() and not (output / MANIFEST_NAME).is_file():
        raise UsageError(f"{output}: exists and is not a bundle (no {MANIFEST_NAME}); choose another output or remove it")
    folder = next(path for path in output.absolute().parents if path.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(f"{output}: {folder} is not a folder that can be written to; choose another output")


class BundleWriter:
    """A folder that becomes the bundle on `finish`; leaving the `with` block without it removes everything.

    An existing bundle at `output` is replaced only by a complete one. Anything else there is an error.
    """

    def __init__(self, output: Path) -> None:
        self.output = output
        check_output(output)
        output.parent.mkdir(parents=True, exist_ok=True)
        self._remove_abandoned()
        self.root = Path(tempfile.mkdtemp(prefix=f"{self._prefix}{os.getpid()}-", dir=output.parent))

    @property
    def _prefix(self) -> str:
        return f".{self.output.name}.partial-"

    def __enter__(self) -> BundleWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
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

    def finish(self, *, model: ModelFacts, toolchain: dict[str, str], targets: list[TargetEntry]) -> None:
        """Write the manifest over all files and move the bundle to its name."""
        paths = sorted(path for path in self.root.rglob("*") if path.is_file())
        manifest = Manifest(
            schema_version=SCHEMA_VERSION,
            min_runtime=MIN_RUNTIME,
            model=model,
            toolchain=toolchain,
            targets=targets,
            files={path.relative_to(self.root).as_posix(): hash_file(path) for path in paths},
        )
        (self.root / MANIFEST_NAME).write_bytes(encode_manifest(manifest))
        self.root.chmod(0o755)
        if self.output.exists():
            old = self.root.with_name(f"{self.root.name}-old")
            self.output.rename(old)
            self.root.rename(self.output)
            shutil.rmtree(old, ignore_errors=True)
        else:
            self.root.rename(self.output)

    def _remove_abandoned(self) -> None:
        """Remove what killed compiles left beside the output."""
        for path in self.output.parent.glob(f"{self._prefix}*"):
            owner = path.name.removeprefix(self._prefix).split("-")[0]
            if owner.isdigit() and not Path(f"/proc/{owner}").exists():
                shutil.rmtree(path, ignore_errors=True)


def write_safetensors(path: Path, specs: list[WeightSpec], tensors: Iterable[tuple[WeightSpec, Array]]) -> None:
    """Stream tensors to a safetensors file in the order of `specs`; only one is in memory at a time.

    The header is padded with spaces to a multiple of 4096 bytes, so the data starts on a page.
    """
    header: dict[str, object] = {}
    end = 0
    for spec in specs:
        start, end = end, end + spec_bytes(spec)
        header[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _PAGE)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for spec, tensor in tensors:
            data = np.ascontiguousarray(tensor)
            if data.nbytes != spec_bytes(spec):
                raise AssertionError(f"{spec.name}: packed {data.nbytes} bytes, its shape {spec.shape} says {spec_bytes(spec)}")
            data.tofile(file)
