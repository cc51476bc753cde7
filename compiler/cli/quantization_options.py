"""The options of calibrated quantisation, which compile and export share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from .sizes import ByteSize

Command = TypeVar("Command", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "--method",
        help="How weights are rounded: rtn (to nearest), opt-rtn, gptq, autoround; after awq or smoothquant with a plus, such as "
        "awq+gptq. [default: rtn; gptq with --calibration or a limit]",
    ),
    click.option(
        "--calibration",
        type=click.Path(path_type=Path),
        help="Texts like the model's traffic: JSONL of chats or texts, or plain text. [default: a small built-in set]",
    ),
    click.option("--calibration-samples", type=int, default=128, show_default=True, help="How many samples of it to use."),
    click.option("--calibration-length", type=int, default=512, show_default=True, help="Most tokens of a sample."),
    click.option(
        "--static-activations",
        is_flag=True,
        help="Round the inputs of w8a8 and fp8 products in steps that calibration fixes, not each token's own.",
    ),
    click.option("--max-build-memory", type=ByteSize(), help="Memory that quantising may take. [default: no limit]"),
    click.option("--resume", is_flag=True, help="Go on with a quantisation that was interrupted."),
)


def quantization_options(command: Command) -> Command:
    """Adds them to a command, in this order."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
