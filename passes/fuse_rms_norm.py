"""`x * rsqrt(mean(x^2) + eps) * weight` becomes one `llmc::rms_norm`."""

from __future__ import annotations

from typing import cast

import torch
from torch import fx

from .base import Pass, PassResult
from .dialect import llmc
from .graph import calls, clean, insert, is_call, replace_node
from .match import either_order, head_transpose, operand, plus_constant

aten = torch.ops.aten


class FuseRmsNorm(Pass):
    """Matches Llama's `weight * norm` and Gemma's `norm * (1 + weight)`; anchored at the `rsqrt`."""

    name = "fuse-rms-norm"
    summary = "pow, mean, rsqrt and two products to llmc.rms_norm"
    requires = frozenset({"canonical"})
    ensures = frozenset({"norms-fused"})
    required = True

    def run(self, module: fx.GraphModule) -> PassResult:
        fused = sum(_fuse(module.graph, rsqrt) for rsqrt in calls(module, aten.rsqrt.default))
        clean(module)
        return PassResult(changed=fused > 0, matches={"rms_norm": fused})


def _fuse(graph: fx.Graph, rsqrt: fx.Node) -> bool:
    mean, eps = plus_constant(rsqrt.args[0])
    if not is_call(mean, aten.mean.dim) or cast(fx.Node, mean).args[1:] != ([-1], True):
        return False
    square = operand(cast(fx.Node, mean))
    if not is_call(square, aten.pow.Tensor_Scalar) or cast(fx.Node, square).args[1] != 2 or len(rsqrt.users) != 1:
        return False
    x = cast(fx.Node, cast(fx.Node, square).args[0])
    normalised = next(iter(rsqrt.users))
    if either_order(normalised, aten.mul.Tensor, lambda n: n is x)[1] is not rsqrt or len(normalised.users) != 1:
        return False
    product = next(iter(normalised.users))
    other = either_order(product, aten.mul.Tensor, lambda n: n is normalised)[1]
    weight, offset = plus_constant(other)
    if not isinstance(weight, fx.Node) or weight.op != "get_attr":
        return False
    with graph.inserting_before(product):
        token_major = head_transpose(x)  # a norm over the last axis commutes with swapping tokens and heads
        norm = insert(graph, llmc.rms_norm.default, token_major or x, weight, eps, offset, "")
        replace_node(product, insert(graph, aten.transpose.int, norm, 1, 2) if token_major else norm)
    return True
