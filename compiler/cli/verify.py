"""`llmc verify`: check every file and every target of a bundle, or whether a model file is as quantised as it claims."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from ...errors import VerificationError
from ...runtime.verification import verify_bundle
from ..verdict import Verdict, is_gguf, is_quantized
from ..verdict_bundle import judge_targets
from ..verdict_huggingface import is_model_folder
from .output import json_option, note, print_json, print_table


@click.command(name="verify")
@click.argument("path", type=click.Path(path_type=Path))
@json_option
def command(path: Path, as_json: bool) -> None:
    """Check PATH: a bundle, a GGUF file, or a Hugging Face folder.

    Of a bundle: sizes and SHA-256 of all files, and of each target the program, weights, tokenizer, and library or kernels, and whether its
    layers are stored in the scheme that it names. What the kernels of a GPU target are built for is read from their binaries; --json lists
    them all with their shared memory, registers and spills. Neither a GPU nor Triton is needed.

    Of a model: whether the stored types and bytes are what its config or file type claims. Only headers are read.

    The exit code is 0 if all is well, 1 if a check failed, and 2 if PATH is none of these.
    """
    is_model = is_gguf(path) or is_model_folder(path)
    problems = _model(is_quantized(path), as_json) if is_model else _bundle(path, as_json)
    if problems and as_json:
        raise click.exceptions.Exit(VerificationError.exit_code)
    if problems:
        for problem in problems[1:]:
            note(f"error: {problem}")
        raise VerificationError(problems[0])


def _bundle(path: Path, as_json: bool) -> list[str]:
    report = verify_bundle(path)
    checks = list(report.checks)
    if not report.problems:
        checks += judge_targets(path)
    problems = [check.problem for check in checks if check.problem is not None]
    if as_json:
        listed = [{"subject": check.subject, "detail": check.detail, "problem": check.problem} for check in checks]
        kernels = [asdict(kernel) for kernel in report.kernels]
        print_json({"ok": not problems, "checks": listed, "kernels": kernels, "extra_files": report.extra_files})
    else:
        rows = [(check.subject, check.detail, "FAILED" if check.problem else "ok") for check in checks]
        print_table(("checked", "", ""), rows)
    for name in report.extra_files:
        note(f"not in the manifest and never read: {name}")
    return problems


def _model(verdict: Verdict, as_json: bool) -> list[str]:
    problems = [f"{verdict.path}: {problem}" for problem in verdict.problems]
    if as_json:
        rows = [asdict(row) | {"bits_per_weight": row.bits} for row in verdict.rows]
        print_json(
            {
                "ok": verdict.ok,
                "claimed": verdict.claimed,
                "layer_bits_per_weight": verdict.layer_bits,
                "stored": rows,
                "problems": problems,
            }
        )
        return problems
    click.echo(f"claimed: {verdict.claimed}")
    print_table(
        ("stored in", "type", "matrices", "weights", "size", "bits a weight"),
        [
            (r.place, r.type_name, str(r.tensors), f"{r.weights / 1e6:.2f} M", f"{r.num_bytes / 1e6:.2f} MB", f"{r.bits:.3g}")
            for r in verdict.rows
        ],
    )
    if verdict.ok:
        click.echo(f"found: the layers take {verdict.layer_bits:.3g} bits a weight, as claimed")
    return problems
