"""Turns whole-sequence attention into attention over the paged KV pool, and the graph's inputs into the step contract."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, fx

from ..errors import PassError
from .base import Pass, PassResult
from .dialect import BLOCK_SIZE, llmc
from .graph import calls, clean, insert, is_call, module_path, replace_node, shape
from .match import head_transpose, operand

aten = torch.ops.aten
_EXAMPLE = {"sequences": 7, "max_blocks": 11, "blocks": 13}


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCacheShape:
    """The pool's dimensions; a block holds `block_size` tokens of every layer."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int = BLOCK_SIZE

    def new_pool(self, num_blocks: int) -> Tensor:
        """A zeroed pool in the layout of the eager reference."""
        return torch.zeros(num_blocks, self.num_layers, 2, self.block_size, self.num_kv_heads, self.head_dim)


class InsertKvCache(Pass):
    """Adds the inputs `query_start`, `context_len`, `block_table` and `kv_pool`; records `meta["kv_cache"]`."""

    name = "insert-kv-cache"
    summary = "llmc.attention to llmc.paged_attention over a block table"
    requires = frozenset({"rope-fused"})
    ensures = frozenset({"kv-cache"})

    def run(self, module: fx.GraphModule) -> PassResult:
        attentions = list(calls(module, llmc.attention.default))
        if not attentions:
            if "kv_cache" in module.meta:
                return PassResult(changed=False)
            raise PassError("insert-kv-cache: the graph has no llmc.attention; found none, expected one in each layer")
        kv_shapes = {(shape(cast(fx.Node, a.args[1]))[1], shape(cast(fx.Node, a.args[1]))[3]) for a in attentions}
        if len(kv_shapes) != 1:
            raise PassError(
                f"insert-kv-cache: layers differ in (kv heads, head size): found {sorted(kv_shapes)}, expected one shape"
            )
        num_kv_heads, head_dim = kv_shapes.pop()
        cache = KvCacheShape(num_layers=len(attentions), num_kv_heads=num_kv_heads, head_dim=head_dim)
        module.meta["kv_cache"] = cache
        step = _add_inputs(module.graph, cache)
        for layer, attention in enumerate(attentions):
            _replace(module.graph, attention, step, layer)
        clean(module)
        return PassResult(changed=True, matches={"paged_attention": len(attentions)})


def _add_inputs(graph: fx.Graph, cache: KvCacheShape) -> tuple[fx.Node, ...]:
    """`(kv_pool, positions, query_start, context_len, block_table)`, the last arguments but the constants of paged attention."""
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    sequences, max_blocks = _EXAMPLE["sequences"], _EXAMPLE["max_blocks"]
    values = {
        "query_start": torch.empty(sequences + 1, dtype=torch.long, device="meta"),
        "context_len": torch.empty(sequences, dtype=torch.long, device="meta"),
        "block_table": torch.empty(sequences, max_blocks, dtype=torch.long, device="meta"),
        "kv_pool": cache.new_pool(_EXAMPLE["blocks"]).to("meta"),
    }
    after = inputs[-1]
    added: dict[str, fx.Node] = {}
    for name, value in values.items():
        with graph.inserting_after(after):
            after = added[name] = graph.placeholder(name)
        after.meta["val"] = value
    positions = next(n for n in inputs if n.target == "positions")
    return (added["kv_pool"], positions, added["query_start"], added["context_len"], added["block_table"])


def _replace(graph: fx.Graph, attention: fx.Node, step: tuple[fx.Node, ...], layer: int) -> None:
    q, k, v = (head_transpose(operand(attention, i)) for i in range(3))
    if q is None or k is None or v is None:
        raise PassError(
            f"insert-kv-cache: {module_path(attention)}: found heads that are not transposed from tokens, expected [1, T, H, D]"
        )
    scale, window, softcap = cast("tuple[float, int, float]", attention.args[3:6])
    with graph.inserting_before(attention):
        paged = insert(graph, llmc.paged_attention.default, q, k, v, *step, scale, window, softcap, layer, False)
    for user in list(attention.users):
        if not is_call(user, aten.view.default) or shape(user) != shape(paged):
            raise PassError(
                f"insert-kv-cache: {module_path(attention)}: attention feeds {user.target}, expected a view that joins the heads"
            )
        replace_node(user, paged)
