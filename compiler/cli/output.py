"""How every verb writes: results on stdout, everything else on stderr; with --json exactly one object on stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

import click

F = TypeVar("F", bound=Callable[..., object])


def json_option(function: F) -> F:
    """The `--json` flag, as the parameter `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print exactly one JSON object on stdout.")(function)


def print_json(value: object) -> None:
    """One JSON object on one line of stdout."""
    click.echo(json.dumps(value, ensure_ascii=False, default=str))


def note(text: str) -> None:
    """A line for people, on stderr."""
    click.echo(text, err=True)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on stdout; cut to the width of a terminal, never cut in a pipe."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, safe_box=True)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    if sys.stdout.isatty():
        Console(highlight=False, markup=False, emoji=False).print(table)
        return
    console = Console(width=240, highlight=False, markup=False, emoji=False, color_system=None)
    with console.capture() as capture:
        console.print(table)
    lines = [line.rstrip() for line in capture.get().splitlines()]
    click.echo("\n".join(line for line in lines if line))
