"""Chooses the stored format of every matrix: weights of the layers, and the embedding and head."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from torch import fx

from ..errors import PassError, UsageError
from ..formats.grid import BITS, GROUP_SIZES
from ..formats.static_step import split_step
from .base import Pass, PassResult
from .dialect import LINEARS, llmc
from .graph import WeightTable, calls, clean, weight_argument

FLOATS = ("f32", "f16", "bf16")
FORMATS = (
    *(*FLOATS, "int8", "fp8", "fp8-fnuz", "w8a8"),
    *(f"{kind}-g{group}" for kind in ("w4a16", *(f"int{bits}" for bits in BITS)) for group in GROUP_SIZES),
    *(f"int{bits}-g{group}-asym" for bits in BITS for group in GROUP_SIZES),
)
_NAMES = "f32, f16, bf16, fp8, fp8-fnuz, w8a8, w4a16-g<group>, int8, int<bits>-g<group> or int<bits>-g<group>-asym"
_NUMBERS = f"bits of {', '.join(map(str, BITS))} and groups of {', '.join(map(str, GROUP_SIZES))}"
_NO_EMBEDDING = ("w4a16", "w8a8", "fp8")  # formats without an embedding kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeOptions:
    """`weights` is the format of the layers' matrices, `head` that of the token embedding and the output head.

    `overrides` gives single matrices, by their graph name, a format of their own.
    """

    weights: str = "f32"
    head: str = "f32"
    overrides: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in (("weights", self.weights), ("head", self.head), *self.overrides.items()):
            if split_step(value)[0] not in FORMATS:
                raise UsageError(f"quantize: {name} format {value!r} is unknown; choose one of {_NAMES}, with {_NUMBERS}")
        if self.head.startswith(_NO_EMBEDDING):
            raise UsageError(
                f"quantize: head format {self.head!r} has no embedding kernel; choose f32, f16, bf16 or an integer format, such as int8-g32"
            )


class Quantize(Pass):
    """int8, fp8 and w8a8 have a scale for each row, formats with `-g` a float16 scale for each group of columns, those with `-asym` a
    minimum, too. Formats with `-static` are the ones without it where weights are stored."""

    name = "quantize"
    summary = "set the stored format of every matrix"
    requires = frozenset({"attention-fused", "gate-up-fused"})
    ensures = frozenset({"quantized"})
    lossy = True

    def __init__(self, options: QuantizeOptions) -> None:
        self.options = options

    def run(self, module: fx.GraphModule) -> PassResult:
        table = WeightTable.of(module)
        unknown = sorted(set(self.options.overrides) - set(table))
        if unknown:
            raise PassError(f"quantize: a format is given for {unknown[0]!r}, expected the name of a matrix of the graph")
        output = cast(fx.Node, module.graph.output_node().args[0])
        heads = {weight_argument(n, 0).target for n in calls(module, llmc.embedding.default)}
        heads |= {weight_argument(n, 1).target for n in calls(module, llmc.linear.default) if n is _source(output)}
        matches: Counter[str] = Counter()
        changed = False
        for node in calls(module, llmc.embedding.default, *LINEARS):
            weight = str(weight_argument(node, 0 if node.target is llmc.embedding.default else 1).target)
            format = self.options.overrides.get(weight) or (self.options.head if weight in heads else self.options.weights)
            if len(table[weight].shape) != 2:
                raise PassError(f"quantize: {weight} has shape {table[weight].shape}, expected a matrix [rows, columns]")
            changed |= node.args[-1] != format
            node.args = (*node.args[:-1], format)
            stored = split_step(format)[0]
            table.set_format(weight, stored)
            matches[stored] += 1
        clean(module)
        return PassResult(changed=changed, matches=matches)


def _source(output: object) -> object:
    return output[0] if isinstance(output, (tuple, list)) else output
