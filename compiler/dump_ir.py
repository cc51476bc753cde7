"""The instrument behind `--dump-ir` and a bundle's report: the graph as text after every pass that changed it, and the pass log."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import fx

from ..errors import UsageError
from ..passes.base import Pass
from ..passes.graph import EXAMPLE_ROWS, EXAMPLE_TOKENS, WeightTable, operator_name, phases
from ..passes.manager import PassRecord
from ..passes.plan_memory import MemoryPlan


class DumpIr:
    """Keeps the graph's text after each pass in `texts`; with a folder, also writes `NNN_pass-name.txt` and `passes.json` there.

    The text is the same bytes for the same graph.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.texts: dict[str, str] = {}
        self.records: list[PassRecord] = []
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            for old in _earlier_dump(folder):
                old.unlink()

    def before(self, step: Pass, module: fx.GraphModule) -> None:
        """Keep the traced graph before the first pass."""
        if not self.records:
            self._keep("000_traced", module)

    def after(self, step: Pass, module: fx.GraphModule, record: PassRecord) -> None:
        """Keep the graph if the pass changed it, and the log so far."""
        self.records.append(record)
        if record.changed:
            self._keep(f"{len(self.records):03}_{step.name}", module)
        if self.folder is not None:
            (self.folder / "passes.json").write_text(json.dumps(log(self.records), indent=2) + "\n")

    def _keep(self, name: str, module: fx.GraphModule) -> None:
        self.texts[name] = graph_text(module)
        if self.folder is not None:
            (self.folder / f"{name}.txt").write_text(self.texts[name])


def _earlier_dump(folder: Path) -> list[Path]:
    """The files of the dump that `folder` holds. Raises `UsageError` where it holds anything else: that is not ours to touch."""
    found = {path.name: path for path in folder.iterdir()}
    try:
        entries = json.loads((folder / "passes.json").read_text())
        names = {"passes.json", "000_traced.txt", *(f"{i:03}_{entry['name']}.txt" for i, entry in enumerate(entries, 1))}
    except (OSError, ValueError, TypeError, KeyError):
        names = set()
    foreign = sorted(set(found) - names)
    if foreign:
        raise UsageError(
            f"--dump-ir {folder}: holds {foreign[0]!r}, expected an empty folder or an earlier dump; choose another"
        )
    return list(found.values())


def log(records: list[PassRecord]) -> list[dict[str, object]]:
    """The pass log without times, so that it is reproducible."""
    return [
        {
            "name": r.name,
            "summary": r.summary,
            "changed": r.changed,
            "matches": r.matches,
            "notes": list(r.notes),
            "operators_before": r.operators_before,
            "operators_after": r.operators_after,
        }
        for r in records
    ]


def graph_text(module: fx.GraphModule) -> str:
    """The graph, one line a node: `name: dtype[shape] = operator(arguments)`; T and R stand for token and logit row counts."""
    lines: list[str] = []
    for phase, graph in phases(module).items():
        lines.append(f"graph {phase}:" if phase else "graph:")
        plan = module.meta.get("memory", {}).get(phase)
        lines += [f"  {_line(node)}{_place(node, plan)}" for node in graph.graph.nodes]
    weights = WeightTable.of(module)
    lines.append("weights:")
    for name in sorted(weights):
        weight = weights[name]
        sources = "" if weight.sources == (name,) else f" = rows of {', '.join(weight.sources)}"
        lines.append(f"  {name}: {weight.format}{list(weight.shape)}{sources}")
    return "\n".join(lines) + "\n"


def _place(node: fx.Node, plan: MemoryPlan | None) -> str:
    """Where plan-memory put a value: `  @ offset + size`."""
    buffer = plan.buffers.get(node.name) if plan is not None else None
    return f"  @ {buffer.offset} + {buffer.size}" if buffer is not None else ""


def _line(node: fx.Node) -> str:
    if node.op == "output":
        return f"return {_argument(node.args[0])}"
    value = node.meta.get("val")
    type_text = f": {_type(value)}" if value is not None else ""
    if node.op in ("placeholder", "get_attr"):
        return f"{node.name}{type_text} = {node.op} {node.target}"
    arguments = [_argument(a) for a in node.args] + [f"{k}={_argument(v)}" for k, v in node.kwargs.items()]
    return f"{node.name}{type_text} = {operator_name(node)}({', '.join(arguments)})"


def _type(value: object) -> str:
    if isinstance(value, torch.Tensor):
        names = {EXAMPLE_TOKENS: "T", EXAMPLE_ROWS: "R"}
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(str(names.get(s, s)) for s in value.shape)}]"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(_type(v) for v in value)})"
    return type(value).__name__


def _argument(argument: object) -> str:
    if isinstance(argument, fx.Node):
        return argument.name
    if isinstance(argument, (tuple, list)):
        return f"[{', '.join(_argument(a) for a in argument)}]"
    return repr(argument) if isinstance(argument, (str, float, int, bool)) or argument is None else str(argument)
