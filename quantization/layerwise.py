"""Runs a calibration graph layer by layer over all samples at once, so that one layer's weights are in memory at a time.

The graph is what `calibration_pipeline` makes: whole sequences, fused projections. It is cut into steps, each of which ends where a
value is known that linears read: there a caller measures the value, quantises those linears, and goes on with what it made of them.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor, fx

from ..passes.dialect import LINEARS, llmc
from ..passes.graph import WeightTable, is_call, weight_argument
from ..passes.match import operand

_LAYER = re.compile(r"\blayers\.(\d+)\.")
ReadWeight = Callable[[str], Tensor]
"""A graph weight or constant by name, float32, as the model is to compute with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Nodes to compute in order; the last makes `source`, the value that `linears` read (None at the end of the graph).

    `layer` is i + 1 for layer i, the first of which begins with the embedding, and one more for the last norm and the head.
    """

    layer: int
    nodes: tuple[fx.Node, ...]
    source: fx.Node | None
    linears: tuple[fx.Node, ...]

    def weights(self) -> list[str]:
        """Names of the matrices of `linears`."""
        return [linear_weight(node) for node in self.linears]


def linear_weight(node: fx.Node) -> str:
    """The name of a linear's matrix."""
    return str(weight_argument(node, 1).target)


def make_steps(module: fx.GraphModule) -> list[Step]:
    """The steps of a calibration graph, in order."""
    layers = _layers(module)
    last = max(layers.values())
    order = sorted(layers, key=lambda node: layers[node])  # stable, and inputs are never in a later layer
    steps: list[Step] = []
    pending: list[fx.Node] = []
    seen: set[fx.Node] = set()
    for node in order:
        source = operand(node) if is_call(node, *LINEARS) else None
        if source is not None and source not in seen:
            seen.add(source)
            readers = tuple(n for n in order if is_call(n, *LINEARS) and operand(n) is source)
            layer = layers[pending[-1]] if pending else layers[node]
            steps.append(Step(layer=layer, nodes=tuple(pending), source=source, linears=readers))
            pending = []
        pending.append(node)
    return [*steps, Step(layer=last, nodes=tuple(pending), source=None, linears=())]


def _layers(module: fx.GraphModule) -> dict[fx.Node, int]:
    """The layer of every call: that of its weights, but never before that of its inputs."""
    named = [int(m[1]) for name in WeightTable.of(module) if (m := _LAYER.search(name))]
    head = max(named, default=-1) + 2
    output = cast("tuple[fx.Node, ...]", module.graph.output_node().args[0])[0]
    layers: dict[fx.Node, int] = {}
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        own = [0]
        for argument in node.all_input_nodes:
            if argument.op == "get_attr":
                match = _LAYER.search(str(argument.target))
                if match is not None:
                    own.append(int(match[1]) + 1)
                elif not is_call(node, llmc.embedding.default, llmc.rope.default):
                    own.append(head)
            elif argument in layers:
                own.append(layers[argument])
        layers[node] = max(own)
    layers[output] = head
    return layers


class Forward:
    """The values of every sample that are still needed, advanced step by step.

    Samples are token ids `[T]`. Values stay in float32; of each sample only what later steps read is kept, in files below `spill` where
    that is given, so that memory holds one sample.
    """

    def __init__(
        self, module: fx.GraphModule, steps: Sequence[Step], samples: Sequence[Tensor], spill: Path | None = None
    ) -> None:
        self.steps = steps
        self.spill = spill
        self._last_use = _last_uses(steps)
        self._values: list[dict[fx.Node, Tensor | _Spilled]] = []
        inputs = {str(node.target): node for node in module.graph.nodes if node.op == "placeholder"}
        for sample in samples:
            tokens = {"token_ids": sample[None], "positions": torch.arange(len(sample))[None]}
            self._values.append({inputs[name]: value for name, value in tokens.items()})

    def fork(self) -> Forward:
        """The same values, to be advanced on their own; tensors are shared, as no step changes one."""
        copy = object.__new__(Forward)
        copy.steps, copy.spill, copy._last_use = self.steps, self.spill, self._last_use
        copy._values = [dict(values) for values in self._values]
        return copy

    def run(self, step: Step, read: ReadWeight, change: Callable[[fx.Node, Tensor], Tensor] | None = None) -> None:
        """Compute the step for all samples, reading each weight once. `change(node, value)` may replace a value when it is made."""
        number = self.steps.index(step)
        weights = {
            argument: read(str(argument.target))
            for node in step.nodes
            for argument in node.all_input_nodes
            if argument.op == "get_attr"
        }
        with torch.no_grad():
            for index, kept in enumerate(self._values):
                values = {node: _load(value) for node, value in kept.items()}
                _compute(step.nodes, values, weights, change)
                live = {node: value for node, value in values.items() if self._last_use.get(node, -1) > number}
                self._values[index] = {
                    node: kept[node] if values[node] is value and node in kept else self._store(value) for node, value in live.items()
                }

    def values(self, node: fx.Node) -> Iterator[Tensor]:
        """A value of each sample without the batch axis: `[T, width]`."""
        return (_load(values[node])[0] for values in self._values)

    def replace(self, node: fx.Node, change: Callable[[int, Tensor], Tensor]) -> None:
        """Replace a value of each sample (by its number) by `change` of it, `[T, width]`."""
        for index, values in enumerate(self._values):
            values[node] = self._store(change(index, _load(values[node])[0])[None])

    def _store(self, value: Tensor) -> Tensor | _Spilled:
        return _Spilled(value, self.spill) if self.spill is not None and value.is_floating_point() else value


class _Spilled:
    """A value in a file, which goes when nothing refers to it any more."""

    def __init__(self, value: Tensor, folder: Path) -> None:
        self.path = folder / f"{uuid4().hex}.npy"
        np.save(self.path, value.numpy())
        weakref.finalize(self, self.path.unlink, missing_ok=True)

    def load(self) -> Tensor:
        """The value."""
        return torch.from_numpy(np.load(self.path))


def _load(value: Tensor | _Spilled) -> Tensor:
    return value.load() if isinstance(value, _Spilled) else value


def _compute(
    nodes: Sequence[fx.Node],
    values: dict[fx.Node, Tensor],
    weights: dict[fx.Node, Tensor],
    change: Callable[[fx.Node, Tensor], Tensor] | None,
) -> None:
    def look_up(node: fx.Node) -> Tensor:
        return weights[node] if node in weights else values[node]

    inner = {n for n in nodes if all(user in nodes for user in n.users)}
    left = {n: len(n.users) for n in inner}
    for node in nodes:
        arguments = fx.map_arg(node.args, look_up)
        result = cast(Callable[..., Tensor], node.target)(*arguments, **node.kwargs)
        values[node] = result if change is None else change(node, result)
        for used in node.all_input_nodes:
            if used in left:
                left[used] -= 1
                if not left[used]:
                    del values[used]


def _last_uses(steps: Sequence[Step]) -> dict[fx.Node, int]:
    """The number of the last step that reads each value; the result of the graph is read by a step after the last."""
    last: dict[fx.Node, int] = {}
    for number, step in enumerate(steps):
        for node in step.nodes:
            for used in node.all_input_nodes:
                last[used] = number
        if step.source is not None:
            last[step.source] = max(last.get(step.source, 0), number + 1)
    last[steps[-1].nodes[-1]] = len(steps)
    return last
