"""Runs a graph in eager torch on real weights, at any point of the pipeline, as the reference that passes are held against."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, fx

from ..passes.dialect import BLOCK_SIZE
from ..passes.graph import WeightTable
from ..passes.insert_kv_cache import KvCacheShape
from .weights import WeightStore


class _Evaluate(fx.Interpreter):
    """Fetches each weight when it is reached and lets go of it after its last use."""

    def __init__(self, module: fx.GraphModule, store: WeightStore) -> None:
        super().__init__(module, garbage_collect_values=True)
        self.store = store
        self.table = WeightTable.of(module)

    def get_attr(self, target: object, args: object, kwargs: object) -> Tensor:
        name = str(target)
        return self.table.constants[name] if name in self.table.constants else self.store.decoded(name, self.table[name])


def _late_weights(module: fx.GraphModule) -> fx.GraphModule:
    """A copy whose weights are fetched just before their first use, not all at the start of the graph."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    copy = fx.GraphModule(module, graph)
    copy.meta = module.meta
    for node in list(graph.nodes):
        if node.op == "get_attr" and node.users:
            min(node.users).prepend(node)
    return copy


def evaluate(module: fx.GraphModule, store: WeightStore, token_ids: Tensor) -> Tensor:
    """Logits `[T, V]` of one whole sequence `token_ids [T]`, whatever contract the graph has by now.

    A graph with a KV pool gets a fresh one and a shuffled block table, so that paging is exercised.
    """
    tokens = len(token_ids)
    inputs: dict[str, Tensor] = {"token_ids": token_ids[None], "positions": torch.arange(tokens)[None]}
    if "kv_cache" in module.meta:
        blocks = -(-tokens // BLOCK_SIZE)
        inputs |= {
            "query_start": torch.tensor([0, tokens]),
            "context_len": torch.tensor([tokens]),
            "block_table": torch.arange(blocks).flip(0)[None],
            "kv_pool": cast(KvCacheShape, module.meta["kv_cache"]).new_pool(blocks),
            "logit_rows": torch.arange(tokens),
        }
    names = [str(node.target) for node in module.graph.nodes if node.op == "placeholder"]
    with torch.no_grad():
        result = _Evaluate(_late_weights(module), store).run(*(inputs[name] for name in names))
    logits = result[0] if isinstance(result, (tuple, list)) else result
    return cast(Tensor, logits)[0]
