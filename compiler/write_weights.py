"""Writes the weights of a bundle: each file holds what the same set of targets reads, so that no target maps what it does not need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import fx

from ..codegen import LoweredProgram, StoredWeight
from ..codegen.bundle_writer import SafetensorsWriter
from ..formats.floats import Array
from ..formats.grid import MatrixValue
from ..passes.graph import WeightTable
from .weights import WeightStore


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPlan:
    """Which stored weights go to which file, in the order in which the first target that reads them takes them."""

    files: dict[str, list[StoredWeight]]
    by_target: dict[str, list[str]]
    first_reader: dict[StoredWeight, str]
    modules: dict[str, fx.GraphModule]

    @classmethod
    def make(cls, programs: dict[str, tuple[fx.GraphModule, LoweredProgram]]) -> WeightPlan:
        """Group the weights of `programs` (by target name) by the set of targets that read them."""
        readers: dict[StoredWeight, list[str]] = {}
        for target, (_, program) in programs.items():
            for weight in program.weights:
                readers.setdefault(weight, []).append(target)
        files: dict[str, list[StoredWeight]] = {}
        for weight, targets in readers.items():
            files.setdefault(_file_name(targets), []).append(weight)
        by_target = {target: [name for name, weights in files.items() if target in readers[weights[0]]] for target in programs}
        return cls(
            files=files,
            by_target=by_target,
            first_reader={weight: targets[0] for weight, targets in readers.items()},
            modules={target: module for target, (module, _) in programs.items()},
        )

    def num_tensors(self) -> int:
        """Tensors of all files."""
        return sum(len(weight.specs()) for weights in self.files.values() for weight in weights)

    def write(self, root: Path, stores: dict[str, WeightStore]) -> Iterator[str]:
        """Write the files below `root`, reading each graph weight once; yields the name of each tensor written.

        `stores` has a store for each target; a weight that several read comes from the first one's.
        """
        with ExitStack() as stack:
            writers = {
                name: stack.enter_context(SafetensorsWriter(root / name, [s for weight in weights for s in weight.specs()]))
                for name, weights in self.files.items()
            }
            order: dict[str, list[tuple[SafetensorsWriter, StoredWeight]]] = {}
            for file, weights in self.files.items():
                for weight in weights:
                    order.setdefault(weight.name, []).append((writers[file], weight))
            for name, places in order.items():
                floats: dict[int, Array] = {}  # by store: targets that share one share the reading
                for writer, weight in places:
                    value = self._value(name, stores[self.first_reader[weight]], weight, floats)
                    for spec, tensor in zip(weight.specs(), weight.tensors(value), strict=True):
                        writer.write(spec, tensor)
                        yield spec.name

    def _value(self, name: str, store: WeightStore, weight: StoredWeight, floats: dict[int, Array]) -> MatrixValue:
        if id(store) in floats:
            return floats[id(store)]
        table = WeightTable.of(self.modules[self.first_reader[weight]])
        if name in table.constants:
            return np.asarray(table.constants[name].numpy(), dtype=np.float32)
        value = store.value(name, table[name])
        if isinstance(value, np.ndarray):
            floats[id(store)] = value
        return value


def _file_name(targets: list[str]) -> str:
    return f"weights/{'+'.join(targets)}.safetensors"
