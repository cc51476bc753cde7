"""Specialises the step for its two phases, and computes logits only for the rows that are asked for."""

from __future__ import annotations

import operator
from typing import cast

import torch
from torch import fx

from ..errors import PassError
from .base import Pass, PassResult
from .dialect import NORMS, llmc
from .graph import EXAMPLE_ROWS, calls, clean, insert, is_call, propagate_shapes
from .match import operand


class SplitPhases(Pass):
    """Adds the input `logit_rows`, gathers those rows before the last norm, and makes `meta["phases"]` = prefill and decode.

    Both graphs keep the whole step contract, so either can run any batch; they differ in how attention is divided among threads:
    by queries in prefill, by keys in decode, where a sequence has one query.
    """

    name = "split-phases"
    summary = "gather the logit rows; one graph for prefill and one for decode"
    requires = frozenset({"quantized", "attention-fused"})
    ensures = frozenset({"phases"})

    def run(self, module: fx.GraphModule) -> PassResult:
        if module.meta.get("phases"):
            return PassResult(changed=False)
        _gather_rows(module)
        propagate_shapes(module)
        graph = fx.Graph()
        graph.output(graph.graph_copy(module.graph, {}))
        decode = fx.GraphModule(module, graph)
        decode.meta = module.meta
        split = 0
        for attention in calls(decode, llmc.rope_paged_attention.default):
            attention.args = (*attention.args[:-1], True)
            split += 1
        module.meta["phases"] = {"prefill": module, "decode": decode}
        clean(module)
        clean(decode)
        return PassResult(changed=True, matches={"gather_rows": 1, "split_kv": split})


def _gather_rows(module: fx.GraphModule) -> None:
    graph = module.graph
    head = cast(fx.Node, graph.output_node().args[0])
    head = cast(fx.Node, head[0]) if isinstance(head, (tuple, list)) else head
    norm = operand(head)
    if is_call(norm, operator.getitem):
        norm = operand(cast(fx.Node, norm))
    if not is_call(head, llmc.linear.default) or not is_call(norm, *NORMS):
        raise PassError(f"split-phases: the graph ends in {head.target}, expected a norm and a linear that makes the logits")
    norm = cast(fx.Node, norm)
    last_input = [n for n in graph.nodes if n.op == "placeholder"][-1]
    with graph.inserting_after(last_input):
        rows = graph.placeholder("logit_rows")
    rows.meta["val"] = torch.empty(EXAMPLE_ROWS, dtype=torch.long, device="meta")
    with graph.inserting_before(norm):
        streams = 2 if norm.target is llmc.add_rms_norm.default else 1
        gathered = [insert(graph, llmc.gather_rows.default, operand(norm, i), rows) for i in range(streams)]
    norm.args = (*gathered, *norm.args[streams:])
