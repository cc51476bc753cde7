"""Drops what export leaves behind and lowers one-to-one operators, so that later patterns have one shape to match."""

from __future__ import annotations

from collections import Counter
from typing import cast

import torch
from torch import fx

from ..errors import UnsupportedModelError
from .base import Pass, PassResult
from .dialect import llmc
from .graph import (
    EXAMPLE_TOKENS,
    Operator,
    WeightTable,
    clean,
    insert,
    is_call,
    module_path,
    operator_name,
    replace_node,
    shape,
    source_line,
    weight_argument,
)

aten = torch.ops.aten
_CASTS: tuple[Operator, ...] = (
    aten.to.dtype,
    aten.to.device,
    aten.to.dtype_layout,
    aten.type_as.default,
    aten._to_copy.default,
)
_COPIES: tuple[Operator, ...] = (aten.contiguous.default, aten.clone.default, aten.alias.default, aten.dropout.default)
_KNOWN: frozenset[Operator] = frozenset(
    {
        *_CASTS,
        *_COPIES,
        *(aten.linear.default, aten.embedding.default, aten.silu.default, aten.gelu.default),
        *(aten.add.Tensor, aten.mul.Tensor, aten.pow.Tensor_Scalar, aten.mean.dim, aten.rsqrt.default, aten.neg.default),
        *(aten.cos.default, aten.sin.default, aten.cat.default, aten.slice.Tensor, aten.chunk.default, aten.matmul.default),
        *(aten.view.default, aten.reshape.default, aten.transpose.int, aten.unsqueeze.default, aten.expand.default),
        *(aten.sym_size.int, aten.sub.Tensor, aten.diff.default, aten.ne.Scalar, aten.cumsum.default),
    }
)


class Canonicalise(Pass):
    """Removes asserts, casts to the same type, copies, dead packing nodes; lowers `linear` and `embedding` to the dialect."""

    name = "canonicalise"
    summary = "drop asserts, aliases, no-op casts and dead nodes; lower linear and embedding"
    ensures = frozenset({"canonical"})

    def run(self, module: fx.GraphModule) -> PassResult:
        matches: Counter[str] = Counter()
        size = len(module.graph.nodes)
        clean(module)  # what is dead may hold anything
        matches["dead"] = size - len(module.graph.nodes)
        for node in list(module.graph.nodes):
            if node.op == "call_function":
                _refuse_unknown(node)
                kind = _rewrite(module, node)
                if kind:
                    matches[kind] += 1
        clean(module)
        return PassResult(changed=any(matches.values()), matches=matches)


def _refuse_unknown(node: fx.Node) -> None:
    if node.target in _KNOWN or operator_name(node).startswith("llmc.") or operator_name(node) == "getitem":
        return
    raise UnsupportedModelError(
        f"canonicalise: {module_path(node)} calls {operator_name(node)} ({source_line(node)}), which llmc does not compile; "
        f"supported: {', '.join(sorted(str(op).removesuffix('.default') for op in _KNOWN))}"
    )


def _rewrite(module: fx.GraphModule, node: fx.Node) -> str | None:
    """Rewrite one node; the name of the rule that fired."""
    graph = module.graph
    first = node.args[0] if node.args else None
    if isinstance(first, fx.Node):
        if is_call(node, *_CASTS) and first.meta["val"].dtype == node.meta["val"].dtype:
            node.replace_all_uses_with(first)
            return "cast"
        if is_call(node, *_COPIES) or (is_call(node, aten.slice.Tensor, aten.expand.default) and shape(node) == shape(first)):
            node.replace_all_uses_with(first)
            return "alias"
        if is_call(node, aten.view.default, aten.reshape.default):
            return _static_view(graph, node, first)
    if is_call(node, aten.cat.default) and (only := _only_part(node)) is not None:
        node.replace_all_uses_with(only)
        return "alias"
    with graph.inserting_before(node):
        if is_call(node, aten.linear.default):
            bias = weight_argument(node, 2) if len(node.args) > 2 and node.args[2] is not None else None
            x = cast(fx.Node, first)
            replace_node(node, insert(graph, llmc.linear.default, x, weight_argument(node, 1), bias, "f32"))
            return "linear"
        if is_call(node, aten.embedding.default):
            return _lower_embedding(module, node)
    return None


def _only_part(cat: fx.Node) -> fx.Node | None:
    """The one part of a `cat` that is not empty (Phi-3 appends the unrotated channels even where there are none)."""
    parts = [part for part in cast("list[fx.Node]", cat.args[0]) if 0 not in shape(part)]
    return parts[0] if len(parts) == 1 else None


def _static_view(graph: fx.Graph, node: fx.Node, source: fx.Node) -> str | None:
    """A view with literal sizes: the token count becomes -1, so no symbolic size is left in the graph."""
    if shape(node) == shape(source):
        node.replace_all_uses_with(source)
        return "alias"
    sizes = [-1 if size == EXAMPLE_TOKENS else size for size in shape(node)]
    if is_call(node, aten.view.default) and list(cast("list[int]", node.args[1])) == sizes:
        return None
    with graph.inserting_before(node):
        replace_node(node, insert(graph, aten.view.default, source, sizes))
    return "view"


def _lower_embedding(module: fx.GraphModule, node: fx.Node) -> str:
    """`embedding(weight, ids)`, times a constant where its only user is that product (Gemma scales by sqrt(H))."""
    constants = WeightTable.of(module).constants
    scale, result = 1.0, node
    if len(node.users) == 1 and is_call(user := next(iter(node.users)), aten.mul.Tensor):
        other = next(a for a in user.args if a is not node)
        while is_call(other, *_CASTS):
            other = cast(fx.Node, other).args[0]
        if isinstance(other, fx.Node) and other.op == "get_attr" and str(other.target) in constants:
            scale, result = constants[str(other.target)].item(), user
    lowered = insert(
        module.graph, llmc.embedding.default, weight_argument(node, 0), cast(fx.Node, node.args[1]), float(scale), "f32"
    )
    replace_node(result, lowered)
    return "embedding"
