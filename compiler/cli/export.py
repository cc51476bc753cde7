"""`llmc export`: a quantised model in the file format of another runtime, read back and compared."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...errors import MissingExtraError
from .output import json_option, note, print_json, print_table
from .quantization_options import quantization_options
from .quantization_summary import print_quantization

if TYPE_CHECKING:
    from ...codegen.export import ExportReport


@click.command(name="export")
@click.argument("model")
@click.option("--format", "format_name", default="gguf", show_default=True, help="gguf or compressed-tensors.")
@click.option(
    "--type",
    "type_name",
    help="GGUF type of the layers' matrices: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, F16, BF16 or F32. [default: Q4_K]",
)
@click.option("--head-type", help="GGUF type of embedding and head. [default: Q6_K, or the type if it is Q8_0 or a float]")
@click.option(
    "--quantization",
    help="Grid of the layers' matrices: int4-g32/64/128, int8, int8-g32/64/128, and with -asym; for compressed-tensors also w8a8 and "
    "fp8, for GGUF also 3, 5 and 6 bits. [default for compressed-tensors: int4-g128]",
)
@quantization_options(limits=False)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The file or folder. [default: named after the model]")
@json_option
def command(
    model: str,
    format_name: str,
    type_name: str | None,
    head_type: str | None,
    quantization: str | None,
    quantize: Mapping[str, Any],
    output: Path | None,
    as_json: bool,
) -> None:
    """Export MODEL (a Hugging Face folder, a GGUF file or a hub id) as GGUF for llama.cpp or as compressed-tensors for vLLM.

    What was written is read back and compared, types, bytes and values, before it gets its name.
    """
    try:
        from ..export import ExportOptions, run
        from ..options import QuantizationOptions
        from ..progress import Terminal
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"exporting needs the package {error.name!r}, which is not installed; run: pip install 'llmc[compile]'"
        ) from None
    options = ExportOptions(
        model=model,
        format=format_name,  # type: ignore[arg-type]  # checked by ExportOptions
        output=output,
        type=type_name,
        head_type=head_type,
        quantization=quantization,
        quantize=QuantizationOptions(**quantize),
    )
    with Terminal() as progress:
        report = run(options, progress)
    if as_json:
        print_json(_as_json(report))
    else:
        _print_summary(report)


def _as_json(report: ExportReport) -> dict[str, object]:
    return {
        "output": str(report.output),
        "output_bytes": report.num_bytes,
        "tensors": report.tensors,
        "bytes_by_type": report.bytes_by_type,
        "exact_matrices": report.exact,
        "relative_errors": report.errors,
        "notes": report.notes,
        **({"quantization": report.quantization.as_json()} if report.quantization else {}),
    }


def _print_summary(report: ExportReport) -> None:
    rows = [
        (
            name,
            str(count),
            f"{report.bytes_by_type.get(name, 0) / 1e6:.2f} MB",
            f"{report.errors[name]:.1e}" if name in report.errors else "-",
        )
        for name, count in report.tensors.items()
    ]
    print_table(("type", "tensors", "size", "largest relative error"), rows)
    if report.quantization is not None:
        print_quantization("", report.quantization)
    for text in report.notes:
        note(f"note: {text}")
    exact = f"; {report.exact} matrices code for code" if report.exact else ""
    click.echo(f"wrote {report.output} ({report.num_bytes / 1e6:.1f} MB), read back and compared{exact}")
