"""Places every activation of a step in one arena, by liveness: values that never live together share memory."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from torch import fx

from ..errors import PassError
from .base import Pass, PassResult
from .dialect import llmc
from .graph import EXAMPLE_ROWS, EXAMPLE_TOKENS, is_call, operator_name, phases, shape

ALIGNMENT = 64
_NORMS = (llmc.rms_norm.default, llmc.add_rms_norm.default)


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

    def __init__(self, max_tokens: int, operand_row_bytes: Callable[[str, int], int]) -> None:
        """`operand_row_bytes(format, width)` is the size of a packed linear input; the rest is float32."""
        self.max_tokens = max_tokens
        self.operand_row_bytes = operand_row_bytes

    def run(self, module: fx.GraphModule) -> PassResult:
        plans = {name: self._plan(graph) for name, graph in phases(module).items()}
        changed = module.meta.get("memory") != plans
        module.meta["memory"] = plans
        matches = Counter({f"{name}_buffers": len(plan.buffers) for name, plan in plans.items()})
        notes = tuple(
            f"{name}: arena {plan.arena_bytes} bytes for {self.max_tokens} tokens, {plan.peak_live_bytes} live at most, "
            f"{plan.total_bytes} without sharing"
            for name, plan in plans.items()
        )
        return PassResult(changed=changed, matches=matches, notes=notes)

    def _plan(self, module: fx.GraphModule) -> MemoryPlan:
        intervals, alias = self._intervals(module)
        placed: list[tuple[_Interval, int]] = []
        for interval in sorted(intervals, key=lambda i: (-self._size(i), i.first)):
            placed.append((interval, self._lowest_gap(interval, placed)))
        buffers = {
            i.name: Buffer(offset=offset, size=self._size(i), rows=i.rows, row_bytes=i.row_bytes, format=i.format)
            for i, offset in placed
        }
        buffers |= {name: buffers[target] for name, target in alias.items()}
        last = max((i.last for i in intervals), default=0)
        live = (sum(self._size(i) for i in intervals if i.first <= t <= i.last) for t in range(last + 1))
        return MemoryPlan(
            buffers=buffers,
            arena_bytes=max((offset + self._size(i) for i, offset in placed), default=0),
            peak_live_bytes=max(live, default=0),
            total_bytes=sum(self._size(i) for i in intervals),
        )

    def _size(self, interval: _Interval) -> int:
        size = interval.row_bytes * self.max_tokens
        return -(-size // ALIGNMENT) * ALIGNMENT

    def _lowest_gap(self, interval: _Interval, placed: list[tuple[_Interval, int]]) -> int:
        offset = 0
        for other, start in sorted(placed, key=lambda p: p[1]):
            if other.last < interval.first or interval.last < other.first:
                continue
            if start - offset >= self._size(interval):
                break
            offset = max(offset, start + self._size(other))
        return offset

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
        format = str(node.args[-1]) if is_call(node, *_NORMS, llmc.pack_rows.default) else ""
        width = dimensions[2]
        row_bytes = self.operand_row_bytes(format, width) if format else 4 * width
        return _Interval(node.name, time, time, rows, row_bytes, format or "f32-rows")
