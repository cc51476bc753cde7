"""The options of calibrated quantisation, which compile and export share."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click

from .sizes import ByteSize

Result = TypeVar("Result")

_SHARED = (
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
_LIMITS = (
    click.option(
        "--memory-budget",
        type=ByteSize(),
        help="Bytes for weights and the KV cache of 4,096 tokens, such as 6GiB: choose formats to fit.",
    ),
    click.option(
        "--max-kl",
        type=float,
        help="Largest mean KL divergence from the unquantised model, in nats: choose formats to keep to it, or fail.",
    ),
)


def quantization_options(*, limits: bool) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Adds them to a command, which gets all of them as the mapping `quantize`; with `limits`, those on bytes and divergence too."""
    options = _SHARED + _LIMITS if limits else _SHARED

    def add(command: Callable[..., Result]) -> Callable[..., Result]:
        own = len(getattr(command, "__click_params__", []))

        @wraps(command)
        def collected(**values: Any) -> Result:
            return command(quantize={name: values.pop(name) for name in names}, **values)

        decorated = collected
        for option in reversed(options):
            decorated = option(decorated)
        names = [parameter.name for parameter in decorated.__click_params__[own:]]  # type: ignore[attr-defined]
        return decorated

    return add
