"""`llmc verify`: check every file and every target of a bundle."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from ...errors import VerificationError
from ...runtime.verification import verify_bundle
from .output import json_option, note, print_json, print_table


@click.command(name="verify")
@click.argument("bundle", type=click.Path(path_type=Path))
@json_option
def command(bundle: Path, as_json: bool) -> None:
    """Check BUNDLE: sizes and SHA-256 of all files, and of each target the program, weights, tokenizer, and library or kernels.

    What the kernels of a GPU target are built for is read from their binaries; --json lists them all with their shared memory,
    registers and spills. Neither a GPU nor Triton is needed.

    The exit code is 0 if all is well, 1 if a check failed, and 2 if BUNDLE is not a bundle at all.
    """
    report = verify_bundle(bundle)
    problems = report.problems
    if as_json:
        checks = [{"subject": check.subject, "detail": check.detail, "problem": check.problem} for check in report.checks]
        kernels = [asdict(kernel) for kernel in report.kernels]
        print_json({"ok": not problems, "checks": checks, "kernels": kernels, "extra_files": report.extra_files})
    else:
        rows = [(check.subject, check.detail, "FAILED" if check.problem else "ok") for check in report.checks]
        print_table(("checked", "", ""), rows)
    for name in report.extra_files:
        note(f"not in the manifest and never read: {name}")
    if problems and as_json:
        raise click.exceptions.Exit(VerificationError.exit_code)
    if problems:
        for check in problems[1:]:
            note(f"error: {check.problem}")
        raise VerificationError(problems[0].problem or "")
