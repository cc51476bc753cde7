"""Scales moved between a producer and its consumers, kept for each checkpoint tensor, and the proof that moving one changes nothing."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Protocol, cast

import numpy as np
import torch
from torch import Tensor, fx

from ..errors import PassError
from ..formats.floats import Array, Float32
from ..passes.graph import EXAMPLE_TOKENS, Weight, WeightTable, is_call
from ..passes.match import ancestors
from .pairs import AbsorbPair

_DIVISOR, _MULTIPLIER, _OFFSET = "divisor", "multiplier", "offset"
BOUND: Final = 1e-9  # of the largest output: float64 leaves some 1e-14, a wrong pair parts of one


class SourceTensors(Protocol):
    """Where the checkpoint's tensors are read; an opened checkpoint is one."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of tensor `name`."""

    def tensor(self, name: str) -> Tensor:
        """Tensor `name` in a floating type."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SourceFactors:
    """What happens to one checkpoint tensor: `(w + offset) / divisor[:, None] * multiplier - offset`.

    `divisor` float32 `[rows]`, `multiplier` float32 `[columns]`; `offset` is a norm's, which multiplies by `w + offset`.
    """

    divisor: Tensor | None = None
    multiplier: Tensor | None = None
    offset: float = 0.0

    def apply(self, tensor: Tensor) -> Tensor:
        """The rescaled tensor, float32, or float64 if it came as such; a new one."""
        wide = tensor.dtype == torch.float64
        if tensor.dim() == 1:  # in float64, since taking the offset off again cancels digits
            value = (tensor.double() + self.offset) / cast(Tensor, self.divisor).double() - self.offset
            return value if wide else value.float()
        value = tensor.clone() if wide else tensor.to(torch.float32, copy=True)
        if self.divisor is not None:
            value /= self.divisor[:, None]
        if self.multiplier is not None:
            value *= self.multiplier
        return value

    def then(self, other: SourceFactors) -> SourceFactors:
        """These factors, then `other`."""
        return SourceFactors(
            divisor=_product(self.divisor, other.divisor),
            multiplier=_product(self.multiplier, other.multiplier),
            offset=self.offset or other.offset,
        )


class Rescaling(Mapping[str, SourceFactors]):
    """Factors by checkpoint tensor; tensors that stay as they are have none, so the identity is empty."""

    def __init__(self, factors: Mapping[str, SourceFactors] | None = None) -> None:
        self._factors = dict(factors or {})

    def __getitem__(self, source: str) -> SourceFactors:
        return self._factors[source]

    def __iter__(self) -> Iterator[str]:
        return iter(self._factors)

    def __len__(self) -> int:
        return len(self._factors)

    @classmethod
    def of(
        cls, pair: AbsorbPair, scale: Tensor, table: WeightTable, source_shape: Callable[[str], tuple[int, ...]]
    ) -> Rescaling:
        """Multiplies the consumers' columns with `scale [width]`, tied as the pair needs, and divides the producer's rows by it.

        `source_shape` gives the shape of a checkpoint tensor. Raises `PassError` for a scale that is not positive and finite or not
        of the pair's width.
        """
        if scale.shape != (pair.width,) or not bool((torch.isfinite(scale) & (scale > 0)).all()):
            raise PassError(f"equalise: {pair}: expected {pair.width} positive, finite scales, found {_summary(scale)}")
        rows = pair.to_producer(scale.float())
        columns = pair.to_consumers(rows)
        factors: dict[str, SourceFactors] = {}
        for part in pair.producer:
            for source, first, count in _source_rows(table[part.name], source_shape):
                start, stop = max(part.start, first), min(part.stop, first + count)
                if start < stop:
                    divisor = torch.ones(count)
                    divisor[start - first : stop - first] = rows[start - part.start : stop - part.start]
                    factors[source] = SourceFactors(divisor=divisor, offset=pair.offset)
        for name in pair.consumers:
            for source in table[name].sources:
                factors[source] = factors.get(source, SourceFactors()).then(SourceFactors(multiplier=columns))
        return cls({source: kept for source, value in factors.items() if (kept := _without_ones(value)) is not None})

    def then(self, other: Rescaling) -> Rescaling:
        """This rescaling, then `other`: `a.then(b).apply(s, t)` is `b.apply(s, a.apply(s, t))` but for rounding."""
        merged = dict(self)
        for source, factors in other.items():
            merged[source] = merged[source].then(factors) if source in merged else factors
        return Rescaling(merged)

    def apply(self, source: str, tensor: Tensor) -> Tensor:
        """Checkpoint tensor `source`, weight or bias, rescaled: float32, or float64 if it came as such."""
        factors = self._factors.get(source)
        if factors is not None:
            fits = [factors.divisor is None or len(factors.divisor) == tensor.shape[0]]
            fits.append(factors.multiplier is None or factors.multiplier.shape == tensor.shape[1:])
            if not all(fits) or (tensor.dim() == 1 and factors.divisor is None):
                raise PassError(
                    f"rescaling: {source} has shape {tuple(tensor.shape)}, which its factors are not for; they belong to another model"
                )
            return factors.apply(tensor)
        return tensor if tensor.dtype == torch.float64 else tensor.to(torch.float32)

    def to_arrays(self) -> dict[str, Float32]:
        """Float32 arrays for a safetensors file: `<source>/divisor`, `<source>/multiplier` and, where not 0, `<source>/offset`."""
        arrays: dict[str, Float32] = {}
        for source, factors in sorted(self.items()):
            if factors.divisor is not None:
                arrays[f"{source}/{_DIVISOR}"] = factors.divisor.numpy().copy()
            if factors.multiplier is not None:
                arrays[f"{source}/{_MULTIPLIER}"] = factors.multiplier.numpy().copy()
            if factors.offset:
                arrays[f"{source}/{_OFFSET}"] = np.array([factors.offset], np.float32)
        return arrays

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array]) -> Rescaling:
        """What `to_arrays` gave. Raises `PassError` for an array that it cannot have given."""
        parts: dict[str, dict[str, Tensor]] = {}
        for name, array in arrays.items():
            source, _, role = name.rpartition("/")
            value = torch.from_numpy(np.array(array, np.float32))
            good = bool(torch.isfinite(value).all()) and (role == _OFFSET or bool((value > 0).all()))
            if not source or role not in (_DIVISOR, _MULTIPLIER, _OFFSET) or value.dim() != 1 or not good:
                raise PassError(
                    f"rescaling: array {name!r} is no divisor, multiplier or offset of a tensor: found {_summary(value)}"
                )
            parts.setdefault(source, {})[role] = value
        factors = {
            source: SourceFactors(
                divisor=part.get(_DIVISOR),
                multiplier=part.get(_MULTIPLIER),
                offset=float(part[_OFFSET][0]) if _OFFSET in part else 0.0,
            )
            for source, part in parts.items()
        }
        return cls(factors)


def prove(
    module: fx.GraphModule,
    pair: AbsorbPair,
    sources: SourceTensors,
    *,
    scale: Tensor | None = None,
    tokens: int = 8,
    bound: float = BOUND,
    seed: int = 0,
) -> float:
    """Runs the graph from the pair's producer to its consumers in float64 with and without `scale [width]`; returns the relative error.

    Inputs are random, the weights those of the checkpoint, `scale` by default random in 1/8..8. Whatever else reads a value on the way
    is compared too. The error is the largest difference over the largest output. Raises `PassError` where it exceeds `bound`.
    """
    generator = torch.Generator().manual_seed(seed)
    if scale is None:
        scale = torch.exp2(6 * torch.rand(pair.width, generator=generator) - 3)
    table = WeightTable.of(module)
    segment = _segment(module, pair)
    inputs = [_random_input(node, tokens, generator) for node in segment.graph.nodes if node.op == "placeholder"]
    rescaling = Rescaling.of(pair, scale, table, sources.shape)
    with torch.no_grad():
        before = _Evaluate(segment, table, sources, Rescaling()).run(*inputs)
        after = _Evaluate(segment, table, sources, rescaling).run(*inputs)
    errors = [float((a - b).abs().max() / a.abs().max().clamp_min(1e-300)) for a, b in zip(before, after, strict=True)]
    error = max(errors) if not any(math.isnan(e) for e in errors) else math.nan
    if not error <= bound:
        raise PassError(
            f"equalise: {pair}: a random scale moved between them changes the outputs by {error:.1e} of the largest, expected at most "
            f"{bound:.0e}; they are not equivalent: leave this pair out"
        )
    return error


class _Evaluate(fx.Interpreter):
    """Computes in float64 on rescaled weights."""

    def __init__(self, module: fx.GraphModule, table: WeightTable, sources: SourceTensors, rescaling: Rescaling) -> None:
        super().__init__(module)
        self.table, self.sources, self.rescaling = table, sources, rescaling

    def get_attr(self, target: object, args: object, kwargs: object) -> Tensor:
        name = str(target)
        if name in self.table.constants:
            return self.table.constants[name].double()
        tensors = (self.rescaling.apply(source, self.sources.tensor(source).double()) for source in self.table[name].sources)
        return torch.cat(list(tensors))


def _segment(module: fx.GraphModule, pair: AbsorbPair) -> fx.GraphModule:
    """The nodes between producer and consumers as a graph of its own; what comes from elsewhere is a placeholder."""
    reader = {str(node.target): next(iter(node.users)) for node in module.graph.nodes if node.op == "get_attr" and node.users}
    producer = reader[pair.producer[0].name]
    consumers = [reader[name] for name in pair.consumers]
    before = set(consumers).union(*(ancestors(node) for node in consumers))
    inside = {producer}
    exits: list[fx.Node] = []  # values that leave the segment but through a consumer
    for node in module.graph.nodes:
        if inside.isdisjoint(node.all_input_nodes):
            continue
        if node in before and not any(source in consumers for source in node.all_input_nodes):
            inside.add(node)
        elif is_call(node, operator.getitem):  # another output of an operator, which may not change
            inside.add(node)
            exits.append(node)
        else:
            exits.extend(n for n in node.all_input_nodes if n in inside and n not in consumers)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}

    def copy_of(node: fx.Node) -> fx.Node:
        if node not in copies and node.op == "get_attr":
            copies[node] = graph.get_attr(str(node.target))
        elif node not in copies:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = dict(node.meta)
        return copies[node]

    ordered = [node for node in module.graph.nodes if node in inside]
    for node in ordered:  # placeholders come first
        for source in node.all_input_nodes:
            if source not in inside:
                copy_of(source)
    for node in ordered:
        copies[node] = graph.node_copy(node, copy_of)
    graph.output(tuple(copies[node] for node in dict.fromkeys([*consumers, *exits])))
    return fx.GraphModule(module, graph)


def _random_input(node: fx.Node, tokens: int, generator: torch.Generator) -> Tensor:
    value = cast(Tensor, node.meta["val"])
    sizes = [tokens if size == EXAMPLE_TOKENS else size for size in value.shape]
    if not value.is_floating_point():
        return torch.arange(tokens).expand(sizes)  # positions
    return torch.randn(sizes, dtype=torch.float64, generator=generator)


def _source_rows(weight: Weight, shape: Callable[[str], tuple[int, ...]]) -> Iterator[tuple[str, int, int]]:
    """`(source, first row in the stack, rows)`."""
    first = 0
    for source in weight.sources:
        rows = shape(source)[0]
        yield source, first, rows
        first += rows


def _product(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a * b


def _without_ones(factors: SourceFactors) -> SourceFactors | None:
    divisor, multiplier = (None if f is None or bool((f == 1).all()) else f for f in (factors.divisor, factors.multiplier))
    if divisor is None and multiplier is None:
        return None
    return SourceFactors(divisor=divisor, multiplier=multiplier, offset=factors.offset if divisor is not None else 0.0)


def _summary(value: Tensor) -> str:
    return f"shape {tuple(value.shape)}, {float(value.min()):.3g} to {float(value.max()):.3g}" if value.numel() else "none"
