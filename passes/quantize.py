"""Chooses the stored format of every matrix: weights of the layers, and the embedding and head."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import cast

from torch import fx

from ..errors import PassError, UsageError
from .base import Pass, PassResult
from .dialect import LINEARS, llmc
from .graph import WeightTable, calls, clean, weight_argument

GROUP_SIZES = (32, 64, 128)
FORMATS = (
    *("f32", "bf16", "int8", "fp8", "fp8-fnuz", "w8a8"),
    *(f"{kind}-g{group}" for kind in ("int8", "int4", "w4a16") for group in GROUP_SIZES),
)
_NO_EMBEDDING = ("int4", "w4a16", "w8a8", "fp8")  # formats without an embedding kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeOptions:
    """`weights` is the format of the layers' matrices, `head` that of the token embedding and the output head."""

    weights: str = "f32"
    head: str = "f32"

    def __post_init__(self) -> None:
        for field, value in (("weights", self.weights), ("head", self.head)):
            if value not in FORMATS:
                raise UsageError(f"quantize: {field} format {value!r} is unknown; choose one of {', '.join(FORMATS)}")
        if self.head.startswith(_NO_EMBEDDING):
            choices = ", ".join(f for f in FORMATS if not f.startswith(_NO_EMBEDDING))
            raise UsageError(f"quantize: head format {self.head!r} is not supported; choose one of {choices}")


class Quantize(Pass):
    """Round-to-nearest: int8, fp8 and w8a8 with a scale for each row, those with `-g` with a float16 scale for each group of columns."""

    name = "quantize"
    summary = "set the stored format of every matrix"
    requires = frozenset({"attention-fused", "gate-up-fused"})
    ensures = frozenset({"quantized"})
    lossy = True

    def __init__(self, options: QuantizeOptions) -> None:
        self.options = options

    def run(self, module: fx.GraphModule) -> PassResult:
        table = WeightTable.of(module)
        output = cast(fx.Node, module.graph.output_node().args[0])
        heads = {weight_argument(n, 0).target for n in calls(module, llmc.embedding.default)}
        heads |= {weight_argument(n, 1).target for n in calls(module, llmc.linear.default) if n is _source(output)}
        matches: Counter[str] = Counter()
        changed = False
        for node in calls(module, llmc.embedding.default, *LINEARS):
            weight = str(weight_argument(node, 0 if node.target is llmc.embedding.default else 1).target)
            format = self.options.head if weight in heads else self.options.weights
            if len(table[weight].shape) != 2:
                raise PassError(f"quantize: {weight} has shape {table[weight].shape}, expected a matrix [rows, columns]")
            changed |= node.args[-1] != format
            node.args = (*node.args[:-1], format)
            table.set_format(weight, format)
            matches[format] += 1
        clean(module)
        return PassResult(changed=changed, matches=matches)


def _source(output: object) -> object:
    return output[0] if isinstance(output, (tuple, list)) else output
