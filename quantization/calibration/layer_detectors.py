"""What calibration can show to be wrong with a layer's statistics: each detector returns a named warning, or None."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .calibration import CalibrationWarning

AMAX_RATIO, AMAX_SHARE = 2.0, 0.01
MAX_SCALE_RANGE = 10.0

Array = npt.NDArray[np.floating[Any]]


def dead_columns(where: str, diagonal: Array) -> CalibrationWarning | None:
    """Inputs of a layer that were zero for every token, from the diagonal of X^T X: [in_features]."""
    dead = int((diagonal == 0).sum())
    if not dead:
        return None
    return CalibrationWarning(
        name="dead-columns",
        text=f"{where}: {dead} of {diagonal.size} inputs were zero for every token, so their weights are rounded blindly; "
        "give more varied samples",
    )


def split_half(where: str, amax_first: Array, amax_second: Array) -> CalibrationWarning | None:
    """The two halves of the samples disagree about the channels' ranges; both are the largest magnitudes: [channels]."""
    low, high = np.minimum(amax_first, amax_second), np.maximum(amax_first, amax_second)
    apart = int((high > AMAX_RATIO * low).sum())
    if apart <= AMAX_SHARE * high.size:
        return None
    return CalibrationWarning(
        name="split-half",
        text=f"{where}: the range of {apart} of {high.size} channels differs by more than {AMAX_RATIO:g} times "
        "between the two halves of the samples; give more of them",
    )


def scale_range(where: str, scales: Array) -> CalibrationWarning | None:
    """AWQ's scales, all positive, span more than a factor of ten: a few channels dominate. [in_features]"""
    spread = float(scales.max() / scales.min())
    if spread <= MAX_SCALE_RANGE:
        return None
    return CalibrationWarning(
        name="scale-range",
        text=f"{where}: the largest scale is {spread:.1f} times the smallest (at most {MAX_SCALE_RANGE:g} is expected); "
        "check the layer's error, or keep it at more bits",
    )


def not_better_than_rtn(where: str, method: str, error: float, rtn_error: float) -> CalibrationWarning | None:
    """A calibrated layer whose error on samples it was not calibrated with is no smaller than rounding to nearest gives."""
    if error < rtn_error:
        return None
    return CalibrationWarning(
        name="not-better-than-rtn",
        text=f"{where}: {method}'s held-out error {error:.3g} does not beat {rtn_error:.3g} of rounding to nearest; "
        "give more samples, closer to your traffic",
    )


def damping_retries(where: str, retries: int, damping: float) -> CalibrationWarning | None:
    """GPTQ's Hessian could not be factorised at first; `damping` is the share of its mean diagonal that was enough."""
    if not retries:
        return None
    return CalibrationWarning(
        name="damping-retries",
        text=f"{where}: the Hessian could be factorised only after {retries} {'retry' if retries == 1 else 'retries'}, "
        f"with damping {damping:g}; give more varied samples",
    )
