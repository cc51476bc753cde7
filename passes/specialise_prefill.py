"""Gives prefill, which is bound by arithmetic, weights of another precision than decode, which is bound by reading them."""

from __future__ import annotations

from collections import Counter

from torch import fx

from ..errors import PassError
from .base import Pass, PassResult
from .dialect import LINEARS
from .graph import WeightTable, calls, clean, insert_weight, weight_argument
from .graph import phases as phases_of
from .quantize import QuantizeOptions

SUFFIX = ".prefill"


class SpecialisePrefill(Pass):
    """Stores the matrices of prefill's layers once more, in `options.weights`, under their names and `.prefill`.

    The embedding and the head stay shared: they are read for few rows in either phase. Without options nothing happens.
    """

    name = "specialise-prefill"
    summary = "store the layers' matrices in a format of prefill's own"
    requires = frozenset({"phases", "quantized"})
    lossy = True

    def __init__(self, options: QuantizeOptions | None) -> None:
        self.options = options

    def run(self, module: fx.GraphModule) -> PassResult:
        if self.options is None:
            return PassResult(changed=False)
        graphs = phases_of(module)
        if "decode" not in graphs:
            raise PassError(f"specialise-prefill: the phases are {', '.join(graphs)}, expected prefill and decode")
        prefill, table = graphs["prefill"], WeightTable.of(module)
        matches: Counter[str] = Counter()
        for node in calls(prefill, *LINEARS):
            shared = weight_argument(node, 1)
            weight = table[str(shared.target)]
            if ".layers." not in str(shared.target) or weight.format == self.options.weights:
                continue
            with prefill.graph.inserting_before(node):
                name = str(shared.target).removesuffix(".weight") + SUFFIX + ".weight"
                own = insert_weight(prefill, name, weight)
            table.set_format(name, self.options.weights)
            node.args = (node.args[0], own, *node.args[2:-1], self.options.weights)
            matches[self.options.weights] += 1
        for graph in graphs.values():
            clean(graph)
        return PassResult(changed=bool(matches), matches=matches)
