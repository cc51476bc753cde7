"""`x * cos + rotate_half(x) * sin` becomes one `llmc::rope` on token-major heads."""

from __future__ import annotations

from typing import cast

import torch
from torch import fx

from .base import Pass, PassResult
from .dialect import llmc
from .graph import WeightTable, calls, clean, insert, is_call, replace_node, shape
from .match import ancestors, either_order, head_transpose, last_axis_slice, operand, times_constant

aten = torch.ops.aten
_RESHAPES = (
    *(aten.unsqueeze.default, aten.expand.default, aten.view.default, aten.transpose.int, aten.cat.default),
    *(aten.to.dtype, aten._to_copy.default),
)


class FuseRope(Pass):
    """Anchored at the `cat` of `rotate_half`; a rotary part followed by an untouched part (Phi-3) is one operator too."""

    name = "fuse-rope"
    summary = "rotary embedding of queries and keys to llmc.rope"
    requires = frozenset({"canonical"})
    ensures = frozenset({"rope-fused"})
    required = True

    def run(self, module: fx.GraphModule) -> PassResult:
        fused = sum(_fuse(module, cat) for cat in calls(module, aten.cat.default))
        clean(module)
        return PassResult(changed=fused > 0, matches={"rope": fused})


def _rotated_source(cat: fx.Node) -> fx.Node | None:
    """`x` if the node is `cat(-x[..., half:], x[..., :half])`."""
    parts = cast("list[fx.Node]", cat.args[0])
    if len(parts) != 2 or not is_call(parts[0], aten.neg.default):
        return None
    high, low = last_axis_slice(parts[0].args[0]), last_axis_slice(parts[1])
    if high is None or low is None or high[0] is not low[0]:
        return None
    x, width = high[0], shape(high[0])[-1]
    return x if high[1:] == (width // 2, width) and low[1:] == (0, width // 2) else None


def _table(factor: fx.Node | None, function: torch._ops.OpOverload) -> tuple[fx.Node, float] | None:
    """The `cos` or `sin` call behind a factor and the constant it is scaled by."""
    while factor is not None and is_call(factor, aten.unsqueeze.default):
        factor = operand(factor)
    source, scaling = times_constant(factor)
    return (cast(fx.Node, source), scaling) if is_call(source, function) else None


def _fuse(module: fx.GraphModule, cat: fx.Node) -> bool:
    x = _rotated_source(cat)
    if x is None or len(cat.users) != 1:
        return False
    sine_product = next(iter(cat.users))
    sin = _table(either_order(sine_product, aten.mul.Tensor, lambda n: n is cat)[1], aten.sin.default)
    total = next(iter(sine_product.users))
    cosine_product = either_order(total, aten.add.Tensor, lambda n: n is sine_product)[1]
    cos = _table(either_order(cosine_product, aten.mul.Tensor, lambda n: n is x)[1], aten.cos.default)
    if sin is None or cos is None or sin[0].args[0] is not cos[0].args[0] or sin[1] != cos[1]:
        return False
    inputs = ancestors(cos[0])
    if not _is_outer_product(inputs):
        return False
    frequencies = [n for n in inputs if n.op == "get_attr"]
    positions = [n for n in inputs if n.op == "placeholder"]
    if len(frequencies) != 1 or len(positions) != 1 or str(frequencies[0].target) not in WeightTable.of(module).constants:
        return False
    if 2 * shape(frequencies[0])[0] != shape(x)[-1]:
        return False
    _replace(module.graph, x, total, positions[0], frequencies[0], cos[1])
    return True


def _is_outer_product(inputs: set[fx.Node]) -> bool:
    """Whether the angle is one product of the inputs, besides reshapes and casts: positions times frequencies, unscaled."""
    calls_ = [n for n in inputs if n.op == "call_function"]
    products = [n for n in calls_ if n.target in (aten.mul.Tensor, aten.matmul.default)]
    return (
        len(products) == 1
        and len(products[0].all_input_nodes) == 2
        and all(n in products or n.target in _RESHAPES for n in calls_)
    )


def _replace(graph: fx.Graph, x: fx.Node, total: fx.Node, positions: fx.Node, frequencies: fx.Node, scaling: float) -> None:
    partial = last_axis_slice(x)
    if partial is not None and len(total.users) == 1 and is_call(join := next(iter(total.users)), aten.cat.default):
        source, rotary = partial[0], partial[2]
        rest = last_axis_slice(cast("list[fx.Node]", join.args[0])[1])
        if partial[1] == 0 and rest == (source, rotary, shape(source)[-1]):
            x, total = source, join
    with graph.inserting_before(total):
        token_major = head_transpose(x) or insert(graph, aten.transpose.int, x, 1, 2)
        rotated = insert(graph, llmc.rope.default, token_major, positions, frequencies, scaling)
        replace_node(total, insert(graph, aten.transpose.int, rotated, 1, 2))
