"""What a calibrated quantisation did, as tables for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from .output import note, print_table

if TYPE_CHECKING:
    from ...quantization.report import QuantizationReport


def print_quantization(target: str, report: QuantizationReport) -> None:
    """Each matrix, then the model's figures beside those of the noise floor; warnings go to stderr."""
    click.echo(
        f"quantized{' for ' + target if target else ''} with {report.method} on {report.calibration_tokens:,} tokens "
        f"({report.calibration}): {report.memory_bytes / 1e6:.1f} MB of matrices"
    )
    rows = [
        (
            m.name,
            m.format if m.input_step is None else f"{m.format}, inputs in steps of {m.input_step:.3g}",
            f"{m.num_bytes / 1e6:.2f} MB",
            *map(_figure, (m.loss, m.rtn_loss, m.kl_alone_int4)),
        )
        for m in report.matrices()
    ]
    print_table(("matrix", "format", "size", "loss", "loss of rtn", "KL alone in int4"), rows)
    columns = {"quantized": report.quality, "bundle": report.bundle_quality, "bf16 -> fp16": report.noise_floor}
    shown = {name: quality.as_json() for name, quality in columns.items() if quality}
    names = [name for name in next(iter(shown.values()), {}) if name != "positions"]
    print_table(("on held-out text", *shown), [(name, *(_figure(values[name]) for values in shown.values())) for name in names])
    for warning in report.warnings:
        note(f"warning: {warning}")


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
