"""Everything between the fused projection and paged attention (head split, q and k norms, rotary, KV append) becomes part of it."""

from __future__ import annotations

from typing import cast

import torch
from torch import fx

from ..errors import PassError
from .base import Pass, PassResult
from .dialect import llmc
from .graph import calls, clean, insert, is_call, module_path, replace_node, shape
from .match import last_axis_slice, operand

aten = torch.ops.aten


class FuseRopeAppend(Pass):
    """Anchored at `llmc.paged_attention`; every layer must match, since executors have kernels for the fused form alone."""

    name = "fuse-rope-append"
    summary = "head split, q and k norms, rope and KV append into llmc.rope_paged_attention"
    requires = frozenset({"kv-cache", "qkv-fused"})
    ensures = frozenset({"attention-fused"})

    def run(self, module: fx.GraphModule) -> PassResult:
        attentions = list(calls(module, llmc.paged_attention.default))
        with_norm = sum(_fuse(module.graph, attention) for attention in attentions)
        clean(module)
        return PassResult(changed=bool(attentions), matches={"rope_append": len(attentions), "with_qk_norm": with_norm})


def _fuse(graph: fx.Graph, attention: fx.Node) -> bool:
    """Fuse one layer; whether it normalises queries and keys."""
    q, k, v = (cast(fx.Node, a) for a in attention.args[:3])
    if not (is_call(q, llmc.rope.default) and is_call(k, llmc.rope.default) and q.args[1:] == k.args[1:]):
        raise PassError(
            f"fuse-rope-append: {module_path(attention)}: found queries and keys without one rotary table, expected llmc.rope on both"
        )
    q_source, q_norm = _peel_norm(q)
    k_source, k_norm = _peel_norm(k)
    if (q_norm is None) != (k_norm is None) or (q_norm and k_norm and q_norm.args[2:] != k_norm.args[2:]):
        raise PassError(
            f"fuse-rope-append: {module_path(attention)}: found a norm on queries or keys alone, expected both or neither"
        )
    q_slice, k_slice, v_slice = (_heads(n) for n in (q_source, k_source, v))
    if q_slice is None or k_slice is None or v_slice is None or not q_slice[0] is k_slice[0] is v_slice[0]:
        raise PassError(
            f"fuse-rope-append: {module_path(attention)}: found q, k and v of separate projections, expected slices of one"
        )
    qkv = q_slice[0]
    if q_slice[1] != 0 or q_slice[2] != k_slice[1] or k_slice[2] != v_slice[1] or v_slice[2] != shape(qkv)[-1]:
        raise PassError(
            f"fuse-rope-append: {module_path(attention)}: found q, k and v out of order in the projection, expected q, k, v"
        )
    norms = (operand(q_norm, 1), operand(k_norm, 1), *q_norm.args[2:4]) if q_norm and k_norm else (None, None, 0.0, 0.0)
    step, constants, split_kv = attention.args[3:8], attention.args[8:-1], attention.args[-1]
    heads = (shape(q)[2], shape(k)[2])
    arguments = (qkv, *norms, q.args[2], q.args[3], *step, *heads, *constants, "f32", False, split_kv)
    with graph.inserting_before(attention):
        replace_node(attention, insert(graph, llmc.rope_paged_attention.default, *cast("tuple[fx.Node, ...]", arguments)))
    graph.erase_node(attention)  # it writes to the pool, so it never counts as dead
    return q_norm is not None


def _peel_norm(rope: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    source = cast(fx.Node, rope.args[0])
    if is_call(source, llmc.rms_norm.default):
        return cast(fx.Node, source.args[0]), source
    return source, None


def _heads(node: fx.Node) -> tuple[fx.Node, int, int] | None:
    """The slice of a projection that a head view `[1, T, H, D]` is made of."""
    return last_axis_slice(operand(node)) if is_call(node, aten.view.default) else None
