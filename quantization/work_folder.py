"""Keeps what was quantised on disk, layer by layer: memory holds one layer, and a killed run goes on where it was."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UsageError
from ..formats.floats import Array
from ..formats.grid import Grid, QuantizedMatrix

_KEY = "key.json"
_META = "llmc"


class WorkFolder:
    """A folder of safetensors parts; each part is written whole or not at all.

    A part holds quantised matrices by name, further float32 arrays, and a JSON record. Its name says what it was made from, so a part
    that is there is right.
    """

    def __init__(self, path: Path, key: Mapping[str, object], *, resume: bool) -> None:
        """`key` is what every part depends on: model, calibration, method. Without `resume` an earlier run's parts are removed.

        Raises UsageError for `resume` where the parts there were made with another key, naming what differs.
        """
        self.path = path
        text = json.dumps(key, sort_keys=True)
        if path.exists():
            if resume:
                self._check(key)
            else:
                shutil.rmtree(path)
        path.mkdir(parents=True, exist_ok=True)
        _write(path / _KEY, (text + "\n").encode())

    def part(self, name: str, made_from: object) -> Part:
        """The part of that name for what it is made from, which is anything that JSON can hold."""
        digest = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:12]
        return Part(self.path / f"{name}-{digest}.safetensors")

    def remove(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _check(self, key: Mapping[str, object]) -> None:
        try:
            found = json.loads((self.path / _KEY).read_text())
        except (OSError, ValueError):
            found = None
        expected = json.loads(json.dumps(key, sort_keys=True))
        if not isinstance(found, dict):
            raise UsageError(f"--resume: {self.path} was not left by a quantisation; remove it and start anew without --resume")
        differ = sorted(k for k in {*found, *expected} if found.get(k) != expected.get(k))
        if differ:
            raise UsageError(
                f"--resume: {self.path} was made with {differ[0]}={found.get(differ[0])!r}, this run has {expected.get(differ[0])!r}; "
                "give the same options, or start anew without --resume"
            )


class Part:
    """One file of a `WorkFolder`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def exists(self) -> bool:
        """Whether it was written."""
        return self.path.is_file()

    def write(self, matrices: Mapping[str, QuantizedMatrix], arrays: Mapping[str, Array], record: object) -> None:
        """Write it under a temporary name, then rename."""
        from safetensors.numpy import save

        tensors: dict[str, Array] = {f"array/{name}": np.ascontiguousarray(value) for name, value in arrays.items()}
        for name, matrix in matrices.items():
            tensors |= {f"codes/{name}": matrix.codes, f"scale/{name}": matrix.scale}
            if matrix.minimum is not None:
                tensors[f"minimum/{name}"] = matrix.minimum
        grids = {name: str(matrix.grid) for name, matrix in matrices.items()}
        metadata = {_META: json.dumps({"grids": grids, "record": record}, sort_keys=True)}
        _write(self.path, save({name: np.ascontiguousarray(t) for name, t in tensors.items()}, metadata))

    def record(self) -> Any:
        """The JSON record that was written with it."""
        return self._meta()["record"]

    def arrays(self) -> dict[str, Array]:
        """The further arrays."""
        with self._open() as file:
            names = [name for name in file.keys() if name.startswith("array/")]  # noqa: SIM118 - not a dict
            return {name.removeprefix("array/"): file.get_tensor(name) for name in names}

    def names(self) -> Iterator[str]:
        """Of the quantised matrices."""
        return iter(self._meta()["grids"])

    def matrix(self, name: str) -> QuantizedMatrix:
        """One matrix, read now."""
        grid = Grid.parse(self._meta()["grids"][name])
        assert grid is not None
        with self._open() as file:
            minimum = None if grid.symmetric else file.get_tensor(f"minimum/{name}")
            return QuantizedMatrix(
                grid=grid, codes=file.get_tensor(f"codes/{name}"), scale=file.get_tensor(f"scale/{name}"), minimum=minimum
            )

    def _open(self) -> Any:  # safe_open has no type stubs
        from safetensors import safe_open

        return safe_open(self.path, framework="np")

    def _meta(self) -> Any:
        with self._open() as file:
            return json.loads(file.metadata()[_META])


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
