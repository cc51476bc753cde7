"""`llmc inspect`: what a bundle or a dump of the passes holds, the graph after a pass, or the difference between two."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import click

from ...errors import UsageError
from ..inspection import Inspection, open_inspection
from .output import json_option, print_json, print_table


@click.command(name="inspect")
@click.argument("bundle_or_dump", type=click.Path(path_type=Path))
@click.option("--pass", "pass_name", metavar="PASS", help="Print the graph after this pass.")
@click.option("--diff", nargs=2, metavar="A B", help="Print how the graph differs between two passes.")
@click.option(
    "--kernels", is_flag=True, help="Print the kernels of each phase, with what they need and the least time they can take."
)
@click.option("--target", help="Whose passes and weights to show. [default: the first]")
@json_option
def command(
    bundle_or_dump: Path,
    pass_name: str | None,
    diff: tuple[str, str] | None,
    kernels: bool,
    target: str | None,
    as_json: bool,
) -> None:
    """Show passes, operators, weights, memory and targets of BUNDLE_OR_DUMP, a bundle or a --dump-ir folder."""
    if sum((pass_name is not None, diff is not None, kernels)) > 1:
        raise UsageError("inspect: --pass, --diff and --kernels exclude each other; give one of them")
    inspection = open_inspection(bundle_or_dump, target)
    if pass_name is not None:
        text = inspection.graph(pass_name)
        print_json({"pass": pass_name, "graph": text}) if as_json else click.echo(text, nl=False)
    elif diff is not None:
        before, after = (inspection.graph(name).splitlines() for name in diff)
        lines = list(difflib.unified_diff(before, after, *diff, lineterm="", n=1))
        print_json({"diff": lines}) if as_json else click.echo("\n".join(lines))
    elif kernels:
        _print_kernels(inspection, as_json)
    elif as_json:
        print_json(inspection.as_json())
    else:
        _print_overview(inspection)


def _print_overview(inspection: Inspection) -> None:
    for name, value in inspection.facts.items():
        click.echo(f"{name}: {value}")
    passes = [
        (
            str(entry["name"]),
            "yes" if entry["changed"] else "no",
            ", ".join(f"{k} {v}" for k, v in entry["matches"].items() if v) or "-",
            str(entry["summary"]),
        )
        for entry in inspection.passes
    ]
    print_table(("pass", "changed", "matches", "what it does"), passes)
    print_table(("operator", "calls"), [(name, str(count)) for name, count in inspection.operators.items()])
    if inspection.weights:
        rows = [(name, str(count), f"{size / 1e6:.2f} MB") for name, (count, size) in inspection.weights.items()]
        print_table(("weights", "tensors", "size"), rows)
    for note in inspection.memory:
        click.echo(f"memory: {note}")


def _print_kernels(inspection: Inspection, as_json: bool) -> None:
    calls, tables = inspection.kernel_calls(), inspection.kernels()
    if as_json:
        print_json({"kernel_calls": calls, "kernels": tables})
        return
    rows = [
        (target, phase, str(index), str(call["kernel"]), str(call["node"]))
        for target, phases in calls.items()
        if target not in tables
        for phase, entries in phases.items()
        for index, call in enumerate(entries)
    ]
    if rows:
        print_table(("target", "phase", "#", "kernel", "value"), rows)
    for target, kernels in tables.items():
        click.echo(f"target {target}:")
        print_table(_KERNEL_COLUMNS, [_kernel_row(kernel) for kernel in kernels])


_KERNEL_COLUMNS = (
    "phase",
    "kernel",
    "calls",
    "arch",
    "shared",
    "registers",
    "spills",
    "matrix",
    "MB",
    "GFLOP",
    "floor us",
    "bound",
)


def _kernel_row(kernel: dict[str, Any]) -> tuple[str, ...]:
    """One line of the table; bytes, operations and floor are those of one call at the reference batch of the phase."""
    names = ("phase", "kernel", "calls", "arch", "shared_bytes", "registers", "spill_bytes")
    matrix = " ".join(sorted(kernel["matrix_instructions"])) or "-"
    floor = ("-", "-", "-", "-")
    if kernel["floor_us"] is not None:
        figures = (kernel["bytes"] / 1e6, kernel["operations"] / 1e9, kernel["floor_us"])
        floor = (*(f"{figure:.3g}" for figure in figures), kernel["bound"])
    return (*(str(kernel[name]) for name in names), matrix, *floor)
