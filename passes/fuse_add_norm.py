"""A residual add and the norm that follows it (with Gemma's post-norm before it) become one `llmc::add_rms_norm`."""

from __future__ import annotations

import operator
from typing import cast

import torch
from torch import fx

from .base import Pass, PassResult
from .dialect import llmc
from .graph import calls, clean, insert, is_call, replace_node
from .match import operand

aten = torch.ops.aten


class FuseAddNorm(Pass):
    """Fires where the old residual has no later use, so that executors may update it in place."""

    name = "fuse-add-norm"
    summary = "residual add, optional post-norm and the next norm to llmc.add_rms_norm"
    requires = frozenset({"norms-fused"})
    ensures = frozenset({"add-norm-fused"})
    required = True

    def run(self, module: fx.GraphModule) -> PassResult:
        fused = with_post_norm = 0
        for norm in calls(module, llmc.rms_norm.default):
            post = _fuse(module.graph, norm)
            fused += post is not None
            with_post_norm += post is True
        clean(module)
        return PassResult(changed=fused > 0, matches={"add_rms_norm": fused, "with_post_norm": with_post_norm})


def _fuse(graph: fx.Graph, norm: fx.Node) -> bool | None:
    """Whether a post-norm went into the fused node; None if the pattern is not there."""
    total = operand(norm)
    if not is_call(total, aten.add.Tensor) or any(not isinstance(a, fx.Node) for a in cast(fx.Node, total).args[:2]):
        return None
    total = cast(fx.Node, total)
    branch_and_stream = _operands(total)
    if branch_and_stream is None:
        return None
    x, residual = branch_and_stream
    weight, eps, offset = norm.args[1], norm.args[2], norm.args[3]
    post = is_call(x, llmc.rms_norm.default) and x.args[3] == offset
    with graph.inserting_before(norm):
        source, post_weight, post_eps = (operand(x), operand(x, 1), x.args[2]) if post else (x, None, 0.0)
        arguments = (source, residual, weight, eps, offset, post_weight, post_eps, "")
        fused = insert(graph, llmc.add_rms_norm.default, *cast("tuple[fx.Node, ...]", arguments))
        replace_node(norm, insert(graph, operator.getitem, fused, 0))
        new_residual = insert(graph, operator.getitem, fused, 1)
        total.replace_all_uses_with(new_residual, delete_user_cb=lambda user: user is not fused)
    return post


def _operands(total: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """`(branch, residual)`: the branch comes from a linear (or its post-norm) and goes nowhere else; the residual is not needed later."""
    first, second = cast("tuple[fx.Node, fx.Node]", total.args[:2])
    for branch, residual in ((second, first), (first, second)):
        is_branch = is_call(branch, llmc.linear.default, llmc.rms_norm.default) and len(branch.users) == 1
        if is_branch and all(user is total or user < total for user in residual.users):
            return branch, residual
    return None
