"""Writes the weights of a bundle: each file holds what the same set of targets reads, so that no target maps what it does not need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import fx

from ..codegen import LoweredProgram, StoredWeight
from ..codegen.bundle_writer import SafetensorsWriter
from ..passes.graph import WeightTable
from ..quantization.number_formats import Array
from .weights import WeightStore


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPlan:
    """Which stored weights go to which file, in the order in which the first target that reads them takes them."""

    files: dict[str, list[StoredWeight]]
    by_target: dict[str, list[str]]
    modules: dict[StoredWeight, fx.GraphModule]

    @classmethod
    def make(cls, programs: dict[str, tuple[fx.GraphModule, LoweredProgram]]) -> WeightPlan:
        """Group the weights of `programs` (by target name) by the set of targets that read them."""
        readers: dict[StoredWeight, list[str]] = {}
        modules: dict[StoredWeight, fx.GraphModule] = {}
        for target, (module, program) in programs.items():
            for weight in program.weights:
                readers.setdefault(weight, []).append(target)
                modules.setdefault(weight, module)
        files: dict[str, list[StoredWeight]] = {}
        for weight, targets in readers.items():
            files.setdefault(_file_name(targets), []).append(weight)
        by_target = {target: [name for name, weights in files.items() if target in readers[weights[0]]] for target in programs}
        return cls(files=files, by_target=by_target, modules=modules)

    def num_tensors(self) -> int:
        """Tensors of all files."""
        return sum(len(weight.specs()) for weights in self.files.values() for weight in weights)

    def write(self, root: Path, store: WeightStore) -> Iterator[str]:
        """Write the files below `root`, reading each graph weight once; yields the name of each tensor written."""
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
                value = _reader(self.modules[places[0][1]], store)(name)
                for writer, weight in places:
                    for spec, tensor in zip(weight.specs(), weight.tensors(value), strict=True):
                        writer.write(spec, tensor)
                        yield spec.name


def _file_name(targets: list[str]) -> str:
    return f"weights/{'+'.join(targets)}.safetensors"


def _reader(module: fx.GraphModule, store: WeightStore) -> Callable[[str], Array]:
    """Reads a graph weight or constant in float32."""
    table = WeightTable.of(module)

    def read(name: str) -> Array:
        value = table.constants[name] if name in table.constants else store.read(table[name])
        return np.asarray(value.numpy(), dtype=np.float32)

    return read
