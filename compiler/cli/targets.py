"""`llmc targets`: what can be compiled for."""

from __future__ import annotations

import click

from ...targets import Device, list_targets
from .output import json_option, print_json, print_table


@click.command(name="targets")
@json_option
def command(as_json: bool) -> None:
    """List what can be compiled for: the names that --target takes, beside paths of device .toml files.

    Memory, bandwidth and rates are peaks of the data sheets, without sparsity; they bound the floors that 'llmc inspect --kernels' shows.
    """
    targets = list_targets()
    if as_json:
        print_json({"targets": [{"name": t.name, "scheme": t.scheme, **_facts(t.device)} for t in targets]})
        return
    schemes: dict[str, list[str]] = {}
    devices = {target.device.name: target.device for target in targets}
    for target in targets:
        schemes.setdefault(target.device.name, []).append(target.scheme)
    rows = [
        (
            device.name,
            " ".join(f"-{scheme}" for scheme in schemes[device.name]),
            ", ".join(device.levels) or device.arch,
            _unit(device.memory_bytes, 1e9, "GB"),
            _unit(device.memory_bandwidth_bytes_per_s, 1e12, "TB/s"),
            " ".join(f"{name} {rate / 1e12:.0f}" for name, rate in device.peak_ops_per_s.items()) or "-",
        )
        for device in devices.values()
    ]
    print_table(("device", "schemes", "built for", "memory", "bandwidth", "10^12 operations/s"), rows)


def _facts(device: Device) -> dict[str, object]:
    return {
        "device": device.name,
        "summary": device.summary,
        "vendor": device.vendor,
        "backend": device.backend,
        "arch": device.arch,
        "levels": list(device.levels),
        "memory_bytes": device.memory_bytes,
        "memory_bandwidth_bytes_per_s": device.memory_bandwidth_bytes_per_s,
        "peak_ops_per_s": device.peak_ops_per_s,
        "sources": list(device.sources),
    }


def _unit(value: float | None, unit: float, name: str) -> str:
    return "-" if value is None else f"{value / unit:.3g} {name}"
