"""The `llmc` command: finds the verb, and turns every failure into one line and an exit code."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

import click

from ... import __version__, environment
from ...errors import LlmcError
from . import output

# Verb -> one line of help. A verb's module is imported only when it is used: `llmc run` never imports torch.
VERBS = {
    "compile": "Compile a model into a bundle.",
    "export": "Write a quantised model in another runtime's format.",
    "inspect": "Show what is in a bundle or in a dump of the passes.",
    "run": "Generate text with a bundle.",
    "targets": "List what can be compiled for.",
    "verify": "Check a bundle, or whether a model file is as quantised as it claims.",
}


class LazyGroup(click.Group):
    """A click group whose commands are the `command` objects of this package's modules."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command = import_module(f".{cmd_name}", __name__).command
        if not isinstance(command, click.Command):
            raise TypeError(f"{cmd_name}.command is not a click command")
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            raise click.UsageError(f"unknown command {args[0]!r}; expected one of {', '.join(VERBS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Environment"):
            formatter.write_dl(
                [(variable.name, f"{variable.meaning} [{variable.default}]") for variable in environment.VARIABLES]
            )

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any
    ) -> None:
        """Run, and exit the process: 0 done, 1 a check failed, 2 wrong usage or bad input, 130 interrupted.

        1 also stands for an internal error, whose traceback is shown if LLMC_LOG=debug.
        """
        arguments = list(sys.argv[1:] if args is None else args)
        extra["standalone_mode"] = False
        try:
            signal.signal(signal.SIGTERM, _terminate)
            _start_logging()
            code = super().main(arguments, prog_name or "llmc", **extra)
            sys.stdout.flush()
        except Exception as error:
            code = _report(error, as_json="--json" in arguments)
        except KeyboardInterrupt:
            code = _report(click.Abort(), as_json="--json" in arguments)
        sys.exit(code if isinstance(code, int) else 0)


def _terminate(number: int, frame: object) -> None:
    """Unwind, so that temporary files go, and exit as a shell reports a signal."""
    sys.exit(128 + number)


def _start_logging() -> None:
    level = environment.LOG.get().upper()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", stream=sys.stderr)
    logging.getLogger("llmc").setLevel(level)


def _report(error: Exception, *, as_json: bool) -> int:
    """Print the error and return the exit code."""
    if isinstance(error, BrokenPipeError):
        # The reader of a pipe has gone; the interpreter's own flush at exit must not complain about it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    kind, text, code = type(error).__name__, " ".join(str(error).split()), 1
    if isinstance(error, LlmcError):
        code = error.exit_code
    elif isinstance(error, click.Abort):
        kind, text, code = "Interrupted", "interrupted", 130
    elif isinstance(error, click.ClickException):
        kind, text, code = "UsageError", " ".join(error.format_message().split()), 2
        context = getattr(error, "ctx", None)
        if context is not None:
            text = f"{text.rstrip('.')}; see '{context.command_path} --help'"
    elif isinstance(error, OSError) and error.strerror:
        kind, code = "OSError", 2
        text = f"{error.filename or 'input or output'}: {error.strerror.lower()}; choose another path or free some space"
    else:
        if os.environ.get("LLMC_LOG", "").lower() == "debug":
            import traceback

            traceback.print_exception(error)
        text = f"internal error: {kind}: {text}; run again with LLMC_LOG=debug and report the traceback"
    with suppress(OSError):  # a full disk or closed stream may be what the error is about
        output.note(f"error: {text}")
        if as_json:
            output.print_json({"error": {"type": kind, "message": text, "exit_code": code}})
    return code


@click.group(
    cls=LazyGroup,
    no_args_is_help=False,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(__version__, "--version", prog_name="llmc", message="%(prog)s %(version)s")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Compile a causal language model into a bundle, and run the bundle without torch."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
