"""The query, key and value projections of a layer become one linear."""

from __future__ import annotations

import torch
from torch import fx

from .base import Pass, PassResult
from .dialect import llmc
from .graph import calls, clean, insert, is_call, replace_node, shape
from .match import head_transpose, last_axis_slice, operand
from .merge import can_stack, stack

aten = torch.ops.aten


class FuseQkv(Pass):
    """Anchored at attention: follows q, k and v back to their linears; a projection that is already one (Phi-3) is counted."""

    name = "fuse-qkv"
    summary = "three projections of attention to one linear and three slices"
    requires = frozenset({"rope-fused", "norms-fused"})
    ensures = frozenset({"qkv-fused"})
    required = True

    def run(self, module: fx.GraphModule) -> PassResult:
        fused = already = 0
        for attention in calls(module, llmc.attention.default):
            projections = [_projection(operand(attention, i)) for i in range(3)]
            linears = [p for p in projections if is_call(p, llmc.linear.default)]
            if len({id(p) for p in linears}) == 3 and can_stack([p for p in linears if p is not None]):
                _fuse(module, [p for p in linears if p is not None])
                fused += 1
            elif all(last_axis_slice(p) is not None for p in projections):
                already += 1
        clean(module)
        return PassResult(changed=fused > 0, matches={"qkv": fused, "already_fused": already})


def _projection(node: fx.Node | None) -> fx.Node | None:
    """The linear (or slice of one) that heads come from, through transposes, views, norms and rotary."""
    while node is not None:
        if head_transpose(node) is None and not is_call(node, aten.view.default, llmc.rope.default, llmc.rms_norm.default):
            return node
        node = operand(node)
    return None


def _fuse(module: fx.GraphModule, linears: list[fx.Node]) -> None:
    graph = module.graph
    with graph.inserting_before(min(linears)):
        weight, bias = stack(module, linears, "qkv_proj")
        fused = insert(graph, llmc.linear.default, operand(linears[0]), weight, bias, "f32")
        start = 0
        for linear in linears:
            stop = start + shape(linear)[-1]
            replace_node(linear, insert(graph, aten.slice.Tensor, fused, 2, start, stop))
            start = stop
