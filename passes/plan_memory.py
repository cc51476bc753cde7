"""Places every activation of a step in one arena, by liveness: values that never live together share memory."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias, cast

from torch import fx

from ..errors import PassError
from .base import Pass, PassResult
from .dialect import NORMS, llmc
from .graph import EXAMPLE_ROWS, EXAMPLE_TOKENS, is_call, operator_name, phases, shape

ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLayout:
    """How a back end stores one row of a value: the name of the format, and bytes."""

    format: str
    row_bytes: int


Storage: TypeAlias = "Callable[[fx.Node, int, str], RowLayout]"
"""`(value, width, pack) -> layout`: `pack` is the linear format that the value is packed for, or empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """A range of the arena: `rows` is `"T"` or `"R"`, `row_bytes` the size of one row, `format` what a row holds."""

    offset: int
    size: int
    rows: str
    row_bytes: int
    format: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Buffers of one phase by value name; `peak_live_bytes` is the floor that no placement can beat."""

    buffers: dict[str, Buffer]
    arena_bytes: int
    peak_live_bytes: int
    total_bytes: int


@dataclass(slots=True)
class _Interval:
    name: str
    first: int
    last: int
    rows: str
    row_bytes: int
    format: str


class PlanMemory(Pass):
    """Greedy by size over live ranges (Pisarchyk and Lee 2020); the residual stream keeps one buffer and is updated in place."""

    name = "plan-memory"
    summary = "arena offsets for every activation"
    requires = frozenset({"phases"})
    ensures = frozenset({"memory-planned"})

    def __init__(self, max_tokens: Mapping[str, int], storage: Storage) -> None:
        """`max_tokens` of a step for each phase."""
        self.max_tokens = max_tokens
        self.storage = storage

    def run(self, module: fx.GraphModule) -> PassResult:
        plans = {name: self._plan(graph, self.max_tokens[name]) for name, graph in phases(module).items()}
        changed = module.meta.get("memory") != plans
        module.meta["memory"] = plans
        matches = Counter({f"{name}_buffers": len(plan.buffers) for name, plan in plans.items()})
        notes = tuple(
            f"{name}: arena {plan.arena_bytes} bytes for {self.max_tokens[name]} tokens, {plan.peak_live_bytes} live at most, "
            f"{plan.total_bytes} without sharing"
            for name, plan in plans.items()
        )
        return PassResult(changed=changed, matches=matches, notes=notes)

    def _plan(self, module: fx.GraphModule, max_tokens: int) -> MemoryPlan:
        intervals, alias = self._intervals(module)
        size = {interval.name: _round_up(interval.row_bytes * max_tokens) for interval in intervals}
        placed: list[tuple[_Interval, int]] = []
        for interval in sorted(intervals, key=lambda i: (-size[i.name], i.first)):
            placed.append((interval, _lowest_gap(interval, placed, size)))
        buffers = {
            i.name: Buffer(offset=offset, size=size[i.name], rows=i.rows, row_bytes=i.row_bytes, format=i.format)
            for i, offset in placed
        }
        buffers |= {name: buffers[target] for name, target in alias.items()}
        last = max((i.last for i in intervals), default=0)
        live = (sum(size[i.name] for i in intervals if i.first <= t <= i.last) for t in range(last + 1))
        return MemoryPlan(
            buffers=buffers,
            arena_bytes=max((offset + size[i.name] for i, offset in placed), default=0),
            peak_live_bytes=max(live, default=0),
            total_bytes=sum(size.values()),
        )

    def _intervals(self, module: fx.GraphModule) -> tuple[list[_Interval], dict[str, str]]:
        """Live ranges of what is stored, and the names that share another's storage. The logits go to the caller's memory."""
        intervals: dict[str, _Interval] = {}
        alias: dict[str, str] = {}
        output = module.graph.output_node()
        logits = set(output.all_input_nodes)
        for time, node in enumerate(module.graph.nodes):
            for source in node.all_input_nodes:
                name = alias.get(source.name, source.name)
                if name in intervals:
                    intervals[name].last = time
            if node.op != "call_function" or node in logits:
                continue
            if is_call(node, operator.getitem):
                self._name_norm_output(node, intervals, alias, time)
            elif is_call(node, llmc.add_rms_norm.default):
                residual = cast(fx.Node, node.args[1])
                alias[f"{node.name}.sum"] = alias.get(residual.name, residual.name)
                intervals[node.name] = self._interval(node, time)
            elif is_call(node, llmc.linear_residual.default):
                residual = cast(fx.Node, node.args[3])
                alias[node.name] = alias.get(residual.name, residual.name)
            else:
                intervals[node.name] = self._interval(node, time)
        return list(intervals.values()), alias

    def _name_norm_output(self, node: fx.Node, intervals: dict[str, _Interval], alias: dict[str, str], time: int) -> None:
        norm = cast(fx.Node, node.args[0])
        alias[node.name] = norm.name if node.args[1] == 0 else alias[f"{norm.name}.sum"]
        intervals[alias[node.name]].last = time

    def _interval(self, node: fx.Node, time: int) -> _Interval:
        value = node if not is_call(node, llmc.add_rms_norm.default) else cast(fx.Node, node.args[0])
        dimensions = shape(value)
        rows = {EXAMPLE_TOKENS: "T", EXAMPLE_ROWS: "R"}.get(dimensions[1])
        if len(dimensions) != 3 or rows is None:
            raise PassError(
                f"plan-memory: {node.name} ({operator_name(node)}) has shape {dimensions}, expected [1, tokens, width]"
            )
        pack = str(node.args[-1]) if is_call(node, *NORMS, llmc.pack_rows.default) else ""
        layout = self.storage(node, dimensions[2], pack)
        return _Interval(node.name, time, time, rows, layout.row_bytes, layout.format)


def _round_up(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _lowest_gap(interval: _Interval, placed: list[tuple[_Interval, int]], size: Mapping[str, int]) -> int:
    offset = 0
    for other, start in sorted(placed, key=lambda p: p[1]):
        if other.last < interval.first or interval.last < other.first:
            continue
        if start - offset >= size[interval.name]:
            break
        offset = max(offset, start + size[other.name])
    return offset
