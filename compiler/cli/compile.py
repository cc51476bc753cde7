"""`llmc compile`: a model in, a bundle out, and a summary of what was done."""

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
    from ..report import CompileReport, TargetReport


_TOLERANCE = "1e-4"


class _OptionalTolerance(click.ParamType[float]):
    """`--verify-each` alone, or with a tolerance after `=`."""

    name = "tolerance"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return float(str(value))
        except ValueError:
            self.fail(f"{value!r} is not a number", param, ctx)


class _CompileCommand(click.Command):
    """Lets `--verify-each` stand alone, so that it never takes the model for its tolerance."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, [f"{a}={_TOLERANCE}" if a == "--verify-each" else a for a in args])


@click.command(name="compile", cls=_CompileCommand)
@click.argument("model")
@click.option(
    "--target", help="What to compile for, as device-scheme, or several with commas: see 'llmc targets'. [default: cpu-int8]"
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The bundle. [default: NAME.llmc]")
@click.option(
    "--quantization",
    help="In place of the target's scheme: bf16, int8, int4 or int4-g32/64/128; on CPUs also f32, fp16, int6, int5, int3, "
    "all integers with -g32/64/128 and -asym, and int8-channel; on GPUs also fp8.",
)
@click.option(
    "--kv-dtype",
    help="KV cache: bf16, fp8, int8; on CPUs also f32, int4, and auto, which measures what each layer needs. "
    "[default: bf16; f32 for f32 models]",
)
@click.option(
    "--prefill-quantization", metavar="NAME", help="Store the layers once more in this precision for prefill, such as bf16."
)
@quantization_options(limits=True)
@click.option("--max-tokens", type=int, help="Most tokens one step may take. [default: 512 on CPUs, 4096 on GPUs]")
@click.option("--cpu-levels", help="Instruction-set levels to build, such as avx2,avx512 or native. [default: all]")
@click.option("--config", type=click.Path(path_type=Path), help="A config.json in place of the model's own.")
@click.option("--num-layers", type=int, help="Compile only the first N layers.")
@click.option("--dump-ir", type=click.Path(path_type=Path), help="Write the graph after each pass to this folder.")
@click.option(
    "--verify-each",
    type=_OptionalTolerance(),
    metavar="[=TOLERANCE]",
    help="Compare logits before and after each pass on the real weights. [tolerance: 1e-4]",
)
@click.option("--stop-after", metavar="PASS", help="Stop after this pass; writes no bundle.")
@click.option("--dry-run", is_flag=True, help="Run every pass and lowering on shapes alone; writes no bundle.")
@json_option
def command(
    model: str,
    target: str | None,
    output: Path | None,
    quantization: str | None,
    kv_dtype: str | None,
    prefill_quantization: str | None,
    quantize: Mapping[str, Any],
    max_tokens: int | None,
    cpu_levels: str | None,
    config: Path | None,
    num_layers: int | None,
    dump_ir: Path | None,
    verify_each: float | None,
    stop_after: str | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Compile MODEL (a Hugging Face folder, a GGUF file, a hub id, or a config.json for random weights) into a bundle."""
    try:
        from ..driver import run
        from ..options import DEFAULT_TARGET, CompileOptions, QuantizationOptions
        from ..progress import Terminal
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"compiling needs the package {error.name!r}, which is not installed; run: pip install 'llmc[compile]'"
        ) from None
    if target is None:
        target = DEFAULT_TARGET
        note(f"no --target given: compiling for {target}")
    options = CompileOptions(
        model=model,
        target=target,
        output=output,
        quantization=quantization,
        prefill_quantization=prefill_quantization,
        kv_dtype=kv_dtype,
        quantize=QuantizationOptions(**quantize),
        max_tokens=max_tokens,
        cpu_levels=tuple(cpu_levels.split(",")) if cpu_levels else None,
        config=config,
        num_layers=num_layers,
        dump_ir=dump_ir,
        verify_each=verify_each,
        stop_after=stop_after,
        dry_run=dry_run,
    )
    with Terminal() as progress:
        report = run(options, progress)
    if as_json:
        print_json(report.as_json())
    else:
        _print_summary(report)


def _print_summary(report: CompileReport) -> None:
    click.echo(
        f"{report.model} ({report.architecture}, {report.num_parameters / 1e6:.1f} M parameters) for {', '.join(report.targets)}"
    )
    for name, target in report.targets.items():
        if len(report.targets) > 1:
            click.echo(f"target {name}:")
        _print_target(target)
    for name, quantization in report.quantization.items():
        print_quantization(name if len(report.quantization) > 1 else "", quantization)
    for text in report.notes:
        note(f"note: {text}")
    seconds = ", ".join(f"{name} {value:.1f}" for name, value in report.stage_seconds.items())
    click.echo(f"seconds: {seconds}")
    if report.output is not None:
        for name, size in report.weight_files.items():
            click.echo(f"{name}: {size / 1e6:.1f} MB")
        click.echo(
            f"wrote {report.output} ({report.bundle_bytes / 1e6:.1f} MB); try: llmc run {report.output} -p 'Once upon a time'"
        )
    else:
        click.echo("wrote no bundle")


def _print_target(target: TargetReport) -> None:
    rows = [
        (r.name, ", ".join(f"{k} {v}" for k, v in r.matches.items() if v) or "-", _operators(r.operators_after))
        for r in target.passes
    ]
    print_table(("pass", "matches", "operators after"), rows)
    for name, error in target.verify_errors.items():
        click.echo(f"verified {name}: relative logit error {error:.1e}")
    if target.weight_bytes:
        weights = ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in target.weight_bytes.items())
        calls = ", ".join(f"{name} {count}" for name, count in target.kernel_calls.items())
        slot = f" and {target.kv_bytes_per_slot} B/sequence in 16 bit" if target.kv_bytes_per_slot else ""
        click.echo(f"weights: {weights}")
        click.echo(
            f"kernel calls: {calls}; arena {target.arena_bytes / 1e6:.1f} MB, KV {target.kv_bytes_per_token} B/token{slot}"
        )


def _operators(counts: dict[str, int]) -> str:
    return f"{sum(counts.values())} ({len(counts)} kinds)"
