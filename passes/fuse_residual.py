"""A linear whose result is added to the residual stream does the addition itself: `llmc::linear_residual`, then a plain norm."""

from __future__ import annotations

import operator
from typing import cast

from torch import fx

from .base import Pass, PassResult
from .dialect import llmc
from .graph import calls, clean, insert, is_call, replace_node


class FuseResidual(Pass):
    """Undoes `llmc.add_rms_norm` where its branch is a linear without a post-norm, for back ends whose linears have a residual epilogue:
    the branch is then neither written nor read."""

    name = "fuse-residual"
    summary = "residual add into the linear before it"
    requires = frozenset({"add-norm-fused"})
    ensures = frozenset({"residual-fused"})

    def run(self, module: fx.GraphModule) -> PassResult:
        fused = 0
        for norm in calls(module, llmc.add_rms_norm.default):
            branch, post_weight = norm.args[0], norm.args[5]
            if is_call(branch, llmc.linear.default) and post_weight is None and len(cast(fx.Node, branch).users) == 1:
                _fuse(module.graph, norm, cast(fx.Node, branch))
                fused += 1
        clean(module)
        return PassResult(changed=fused > 0, matches={"linear_residual": fused})


def _fuse(graph: fx.Graph, norm: fx.Node, branch: fx.Node) -> None:
    residual, weight, eps, offset = norm.args[1:5]
    x, matrix, bias, format = branch.args
    with graph.inserting_before(norm):
        total = insert(graph, llmc.linear_residual.default, *cast("tuple[fx.Node, ...]", (x, matrix, bias, residual, format)))
        output = insert(graph, llmc.rms_norm.default, *cast("tuple[fx.Node, ...]", (total, weight, eps, offset, norm.args[-1])))
    for part in list(norm.users):
        assert is_call(part, operator.getitem)
        replace_node(part, total if part.args[1] else output)
