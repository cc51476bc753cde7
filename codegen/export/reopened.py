"""Compares a written model with what was meant, tensor by tensor, and collects every difference."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final

import numpy as np
import torch

from ...errors import VerificationError
from ...formats.floats import Array

_BOUNDS: Final = {  # largest relative error that rounding can explain, in a block of one large weight and many at half a step
    "F32": 1e-6,
    "F16": 1e-3,
    "BF16": 4e-3,
    "Q8_0": 0.03,
    "Q6_K": 0.1,
    "Q5_K": 0.2,
    "Q5_1": 0.2,
    "Q5_0": 0.2,
    "Q4_K": 0.4,
    "Q4_1": 0.4,
    "Q4_0": 0.4,
    "fp8": 0.07,
    "rounded scale": 1e-3,
}


def digest(data: Array) -> bytes:
    """SHA-256 of an array's bytes."""
    return hashlib.sha256(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data).digest()


class Differences:
    """What is not as it was meant; `errors` keeps the largest relative error of each kind of rounding."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.problems: list[str] = []
        self.errors: dict[str, float] = {}

    def equal(self, subject: str, found: object, expected: object) -> None:
        """`found` must be `expected`."""
        if found != expected:
            self.problems.append(f"{subject} is {found}, expected {expected}")

    def same_names(self, found: Iterable[str], expected: Iterable[str]) -> None:
        """The two sets of tensors must be the same."""
        found, expected = set(found), set(expected)
        for kind, names in (("absent", expected - found), ("not meant to be there", found - expected)):
            if names:
                self.problems.append(f"{len(names)} tensors are {kind}, first {min(names)}")

    def close(self, name: str, found: torch.Tensor, meant: torch.Tensor, kind: str) -> None:
        """Values must differ by no more than rounding to `kind` explains; `exact` is to the last bit."""
        if found.shape != meant.shape:
            self.problems.append(f"{name} has shape {list(found.shape)}, expected {list(meant.shape)}")
            return
        found, meant = found.float(), meant.float()
        if kind == "exact":
            if not torch.equal(found, meant):
                self.problems.append(f"{name} differs from its codes and scales in {int((found != meant).sum())} values")
            return
        error = float((found - meant).norm() / meant.norm().clamp_min(1e-30))
        self.errors[kind] = max(error, self.errors.get(kind, 0.0))
        if not error <= _BOUNDS[kind]:  # NaN fails too
            self.problems.append(f"{name} has a relative error of {error:.3g}, expected at most {_BOUNDS[kind]} for {kind}")

    def check(self) -> None:
        """Raises `VerificationError` if there is any difference."""
        if self.problems:
            shown = "; ".join(self.problems[:3])
            more = f"; and {len(self.problems) - 3} more" if len(self.problems) > 3 else ""
            raise VerificationError(
                f"{self.where}: what was written is not what was meant, and has been removed: {shown}{more}"
            )
