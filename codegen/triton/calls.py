"""Kernel calls under construction: named arguments, workspace whose place in the arena is not known yet, weights by index."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from ...formats.floats import round_up
from ...runtime.program import Argument, Call, Extent
from .kernel import Kernel
from .weight_layout import GpuWeight

_ALIGN = 256


@dataclass(frozen=True, slots=True)
class Region:
    """A part of a workspace by name, such as the partial sums of split products; `owner` is the stream that uses it."""

    owner: str
    name: str


Value: TypeAlias = "Argument | Region"


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a call moves and computes at its phase's reference batch: bytes from and to memory, operations of one type."""

    bytes: int
    operations: int = 0
    dtype: str = "bf16"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCall:
    """One launch: `arguments` by the names of the kernel's parameters."""

    kernel: Kernel
    node: str
    inputs: tuple[str, ...]
    weights: tuple[str, ...]
    arguments: Mapping[str, Value]
    work: Work

    def describe(self, workspace: Workspace) -> Call:
        """The call as program.json lists it."""
        missing = [p.name for p in self.kernel.parameters if p.name not in self.arguments]
        if missing:
            raise AssertionError(f"{self.node}: kernel {self.kernel.name} takes {missing}, which lowering does not pass")
        values = [self.arguments[parameter.name] for parameter in self.kernel.parameters]
        return Call(
            kernel=self.kernel.name,
            node=self.node,
            inputs=list(self.inputs),
            outputs=[self.node],
            weights=list(self.weights),
            grid=[
                Extent(symbol=e.symbol, divisor=e.divisor, factor=e.factor, add_sequences=e.add_sequences)
                for e in self.kernel.grid
            ],
            arguments=[workspace.argument(value) if isinstance(value, Region) else value for value in values],
        )


@dataclass(slots=True)
class Workspace:
    """Regions behind the activations in the arena. A region is as large as its largest user needs; no two overlap."""

    _sizes: dict[Region, int] = field(default_factory=dict)
    _start: int = 0

    def region(self, owner: str, name: str, size: int) -> Region:
        """A region of at least `size` bytes; the same name is the same memory."""
        region = Region(owner, name)
        self._sizes[region] = max(self._sizes.get(region, 0), round_up(size, _ALIGN))
        return region

    def place(self, start: int) -> int:
        """Put the regions from byte `start` of the arena on, once all are known; returns where they end."""
        self._start = round_up(start, _ALIGN)
        return self._start + sum(self._sizes.values())

    def argument(self, region: Region) -> Argument:
        """Where a region is."""
        offset = self._start
        for other, size in self._sizes.items():
            if other == region:
                return Argument("arena", offset)
            offset += size
        raise AssertionError(f"{region} was never asked for")


@dataclass(slots=True)
class WeightList:
    """The weights of a program in the order of their tensors, shared by its phases."""

    stored: list[GpuWeight] = field(default_factory=list)
    _position: dict[GpuWeight, int] = field(default_factory=dict)
    _tensors: int = 0

    def index(self, weight: GpuWeight) -> int:
        """The index of the first tensor of `weight`, which is added on first use."""
        if weight not in self._position:
            self._position[weight] = self._tensors
            self._tensors += len(weight.specs())
            self.stored.append(weight)
        return self._position[weight]
