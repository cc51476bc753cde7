"""`activation(gate) * up` becomes one `llmc::glu`."""

from __future__ import annotations

import torch
from torch import fx

from .base import Pass, PassResult
from .dialect import llmc
from .graph import calls, clean, insert, replace_node, shape
from .match import either_order, operand

aten = torch.ops.aten


class FuseGlu(Pass):
    """Gated linear units with SiLU, tanh-GELU or erf-GELU; anchored at the activation."""

    name = "fuse-glu"
    summary = "activation and product to llmc.glu"
    requires = frozenset({"canonical"})
    ensures = frozenset({"glu-fused"})
    required = True

    def run(self, module: fx.GraphModule) -> PassResult:
        fused = sum(_fuse(module.graph, node) for node in calls(module, aten.silu.default, aten.gelu.default))
        clean(module)
        return PassResult(changed=fused > 0, matches={"glu": fused})


def _activation(node: fx.Node) -> str:
    if node.target is aten.silu.default:
        return "silu"
    return "gelu_tanh" if node.kwargs.get("approximate") == "tanh" else "gelu"


def _fuse(graph: fx.Graph, activation: fx.Node) -> bool:
    gate = operand(activation)
    if gate is None or len(activation.users) != 1:
        return False
    product = next(iter(activation.users))
    up = either_order(product, aten.mul.Tensor, lambda n: n is activation)[1]
    if up is None or shape(up) != shape(gate):
        return False
    with graph.inserting_before(product):
        replace_node(product, insert(graph, llmc.glu.default, gate, up, _activation(activation)))
    return True
