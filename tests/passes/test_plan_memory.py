"""plan-memory: values that live together never overlap, and the arena stays near the floor."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llmc.passes.graph import is_call, phases
from llmc.passes.quantize import QuantizeOptions


def _live_ranges(graph: Any, names: set[str]) -> dict[str, tuple[int, int]]:
    """First and last use of each value, recomputed here from the graph alone."""
    ranges: dict[str, tuple[int, int]] = {}
    for time, node in enumerate(graph.nodes):
        if node.name in names:
            ranges[node.name] = (time, time)
        for source in node.all_input_nodes:
            if source.name in ranges:
                ranges[source.name] = (ranges[source.name][0], time)
    return ranges


def test_live_values_never_overlap(before: Callable[..., Any], architecture: str) -> None:
    stage = before("plan-memory", architecture, QuantizeOptions(weights="int8", head="int8"))
    result = stage.run()
    assert result.changed
    for name, graph in phases(stage.module).items():
        plan = stage.module.meta["memory"][name]
        nodes = {n.name: n for n in graph.graph.nodes}
        ranges = _live_ranges(graph.graph, set(plan.buffers) & set(nodes))
        assert len(ranges) > 20
        for a, (first_a, last_a) in ranges.items():
            for b, (first_b, last_b) in ranges.items():
                if a >= b or last_a <= first_b or last_b <= first_a:
                    continue
                x, y = plan.buffers[a], plan.buffers[b]
                if x == y:
                    assert is_call(nodes[a], operator.getitem) or is_call(nodes[b], operator.getitem), (a, b)
                    continue
                assert x.offset + x.size <= y.offset or y.offset + y.size <= x.offset, (a, b)
        assert plan.peak_live_bytes <= plan.arena_bytes <= 1.5 * plan.peak_live_bytes
        assert plan.arena_bytes < plan.total_bytes / 2


def test_the_residual_stream_stays_in_place(before: Callable[..., Any]) -> None:
    stage = before("plan-memory", "llama")
    stage.run()
    plan = stage.module.meta["memory"]["prefill"]
    graph = phases(stage.module)["prefill"].graph
    streams = [n for n in graph.nodes if is_call(n, operator.getitem) and n.args[1] == 1]
    assert len({plan.buffers[n.name].offset for n in streams}) == 1


def test_a_second_run_changes_nothing(before: Callable[..., Any]) -> None:
    stage = before("plan-memory", "qwen3")
    assert stage.run().changed
    assert not stage.run().changed
