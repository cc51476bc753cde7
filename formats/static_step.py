"""Names of formats whose inputs are rounded in steps of one size for all tokens: `w8a8-static0.0123`, `fp8-static0.5`.

The step is what 1 in the stored type stands for. It is found in calibration; without one, each token's largest value gives its own.
"""

from __future__ import annotations

from typing import Final

LARGEST: Final = {"w8a8": 127.0, "fp8": 448.0, "fp8-fnuz": 240.0}
"""Formats whose inputs are rounded to 8 bits, and the largest value of the type."""
_MARK: Final = "-static"


def with_step(format: str, step: float) -> str:
    """`"w8a8"` and 0.0123 -> `"w8a8-static0.0123"`, in place of the step it may have, with as many digits as a float32 has."""
    return f"{split_step(format)[0]}{_MARK}{step:.9g}"


def split_step(name: str) -> tuple[str, float | None]:
    """`"w8a8-static0.0123"` -> `("w8a8", 0.0123)`; None for a format without a step, or where what follows is none for it."""
    format, mark, text = name.partition(_MARK)
    if not mark or format not in LARGEST:
        return name, None
    try:
        step = float(text)
    except ValueError:
        return name, None
    return (format, step) if 0 < step < float("inf") else (name, None)
