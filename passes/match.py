"""Small questions about nodes that the fusion passes ask, so that each pattern reads as the formula it stands for."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import fx

from .graph import Operator, is_call, shape

aten = torch.ops.aten


def operand(node: fx.Node, position: int = 0) -> fx.Node | None:
    """The node at an argument position, or None if there is a constant."""
    argument = node.args[position] if len(node.args) > position else None
    return argument if isinstance(argument, fx.Node) else None


def either_order(
    node: object, target: Operator, first: Callable[[object], bool]
) -> tuple[fx.Node, fx.Node] | tuple[None, None]:
    """The operands of a commutative call, the one that satisfies `first` in front; (None, None) if it is not such a call."""
    if is_call(node, target):
        a, b = cast(fx.Node, node).args[:2]
        for x, y in ((a, b), (b, a)):
            if isinstance(x, fx.Node) and isinstance(y, fx.Node) and first(x):
                return x, y
    return None, None


def plus_constant(node: object) -> tuple[object, float]:
    """`(x, c)` for `x + c`; any other node is `(node, 0.0)`."""
    if is_call(node, aten.add.Tensor):
        x, c = cast(fx.Node, node).args[:2]
        if isinstance(c, (int, float)):
            return x, float(c)
    return node, 0.0


def times_constant(node: object) -> tuple[object, float]:
    """`(x, c)` for `x * c`; any other node is `(node, 1.0)`."""
    if is_call(node, aten.mul.Tensor):
        x, c = cast(fx.Node, node).args[:2]
        if isinstance(c, (int, float)):
            return x, float(c)
    return node, 1.0


def last_axis_slice(node: object) -> tuple[fx.Node, int, int] | None:
    """`(source, start, stop)` of a slice along the last axis."""
    if not is_call(node, aten.slice.Tensor):
        return None
    call = cast(fx.Node, node)
    source, axis, start, stop = (*call.args, 0, None, None)[:4]
    width = shape(cast(fx.Node, source))[-1]
    if axis not in (-1, len(shape(call)) - 1):
        return None
    return cast(fx.Node, source), cast(int, start or 0), min(width, cast(int, stop) if stop is not None else width)


def head_transpose(node: object) -> fx.Node | None:
    """The source of a transpose of axes 1 and 2 (token-major heads to head-major or back)."""
    if is_call(node, aten.transpose.int) and cast(fx.Node, node).args[1:] in ((1, 2), (2, 1)):
        return operand(cast(fx.Node, node))
    return None


def ancestors(node: fx.Node) -> set[fx.Node]:
    """All nodes that `node` is computed from."""
    seen: set[fx.Node] = set()
    stack = list(node.all_input_nodes)
    while stack:
        current = stack.pop()
        if current not in seen:
            seen.add(current)
            stack.extend(current.all_input_nodes)
    return seen
