"""The gate and up projections of an MLP and their gated activation become one `llmc::linear_glu`."""

from __future__ import annotations

import operator
from typing import cast

import torch
from torch import fx

from .base import Pass, PassResult
from .dialect import llmc
from .graph import calls, clean, insert, is_call, replace_node
from .match import operand
from .merge import can_stack, stack

aten = torch.ops.aten


class FuseGateUp(Pass):
    """Anchored at `llmc.glu`: two linears of one input, or the two chunks of one linear (Phi-3)."""

    name = "fuse-gate-up"
    summary = "gate and up projections and llmc.glu to one linear with a gated epilogue"
    requires = frozenset({"glu-fused"})
    ensures = frozenset({"gate-up-fused"})
    required = True

    def run(self, module: fx.GraphModule) -> PassResult:
        fused = sum(_fuse(module, glu) for glu in calls(module, llmc.glu.default))
        clean(module)
        return PassResult(changed=fused > 0, matches={"linear_glu": fused})


def _fuse(module: fx.GraphModule, glu: fx.Node) -> bool:
    gate, up, activation = cast(fx.Node, glu.args[0]), cast(fx.Node, glu.args[1]), cast(str, glu.args[2])
    graph = module.graph
    with graph.inserting_before(glu):
        x: fx.Node | None
        weight: fx.Node | None
        if is_call(gate, llmc.linear.default) and is_call(up, llmc.linear.default) and can_stack((gate, up)):
            x = operand(gate)
            weight, bias = stack(module, (gate, up), "gate_up_proj")
        elif (joint := _both_chunks(gate, up)) is not None:
            x, weight, bias = (operand(joint, i) for i in range(3))
        else:
            return False
        replace_node(glu, insert(graph, llmc.linear_glu.default, x, weight, bias, activation, "f32"))
    return True


def _both_chunks(gate: fx.Node, up: fx.Node) -> fx.Node | None:
    """The linear whose first half is `gate` and second half is `up`."""
    if not (is_call(gate, operator.getitem) and is_call(up, operator.getitem)):
        return None
    if gate.args[0] is not up.args[0] or (gate.args[1], up.args[1]) != (0, 1):
        return None
    chunk = cast(fx.Node, gate.args[0])
    if not is_call(chunk, aten.chunk.default) or chunk.args[1:] not in ((2, -1), (2, 2)):
        return None
    linear = operand(chunk)
    return linear if is_call(linear, llmc.linear.default) else None
