"""Stacks the weights of linears that read the same input into one linear; shared by fuse-qkv and fuse-gate-up."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from .graph import Weight, WeightTable, insert_weight, weight_argument


def can_stack(linears: Sequence[fx.Node]) -> bool:
    """Whether the linears read one input and agree on having a bias."""
    return len({node.args[0] for node in linears}) == 1 and len({node.args[2] is None for node in linears}) == 1


def stack(module: fx.GraphModule, linears: Sequence[fx.Node], name: str) -> tuple[fx.Node, fx.Node | None]:
    """`(weight, bias)` nodes of one linear that computes all of `linears`; the rows keep their order.

    The sources stay in the checkpoint until the weights are packed, so nothing is held twice. `name` is the last part of the new
    weight's path, such as `qkv_proj`.
    """
    weights = [weight_argument(node, 1) for node in linears]
    parent = str(weights[0].target).rsplit(".", 2)[0]
    weight = insert_weight(module, f"{parent}.{name}.weight", _stacked(module, weights))
    if linears[0].args[2] is None:
        return weight, None
    biases = [weight_argument(node, 2) for node in linears]
    return weight, insert_weight(module, f"{parent}.{name}.bias", _stacked(module, biases))


def _stacked(module: fx.GraphModule, nodes: Sequence[fx.Node]) -> Weight:
    parts = [WeightTable.of(module)[str(node.target)] for node in nodes]
    rows = sum(part.shape[0] for part in parts)
    return Weight(sources=tuple(s for part in parts for s in part.sources), shape=(rows, *parts[0].shape[1:]))
