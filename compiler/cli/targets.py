"""`llmc targets`: what can be compiled for."""

from __future__ import annotations

import click

from ...targets import list_targets
from .output import json_option, print_json, print_table


@click.command(name="targets")
@json_option
def command(as_json: bool) -> None:
    """List what can be compiled for: the names that --target takes, beside paths of device .toml files."""
    targets = list_targets()
    if as_json:
        fields = [
            {"name": target.name, "device": target.device.name, "scheme": target.scheme, "backend": target.backend}
            for target in targets
        ]
        print_json({"targets": fields})
        return
    rows = [
        (target.name, target.backend, target.scheme, ", ".join(target.device.levels) or target.device.arch)
        for target in targets
    ]
    print_table(("target", "backend", "scheme", "built for"), rows)
