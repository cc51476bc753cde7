"""What calibration is made of: token samples, where they came from, and what is doubtful about them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ...errors import LlmcError


class CalibrationError(LlmcError):
    """Calibration data that cannot be used: empty, malformed, or of a kind that the model cannot read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationWarning:
    """A doubt about the calibration: it goes on, but the result may be worse than it could be."""

    name: str  # in kebab case, for scripts and reports: "few-samples"
    text: str  # one sentence with the figures and what to do

    def __str__(self) -> str:
        return f"{self.name}: {self.text}"


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The samples that a model is calibrated with."""

    samples: list[npt.NDArray[np.int64]]  # token ids, each one-dimensional and not empty
    source: str  # for reports: a file's name, "built-in texts" or "random tokens"
    warnings: tuple[CalibrationWarning, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples together."""
        return sum(len(sample) for sample in self.samples)

    @cached_property
    def digest(self) -> str:
        """The sha256 of lengths and token ids, in hexadecimal: equal for equal samples in equal order."""
        return digest_of(self.samples)


def digest_of(samples: Sequence[npt.NDArray[np.int64]]) -> str:
    """The sha256 over each sample's length and ids as little-endian int64."""
    total = hashlib.sha256()
    for sample in samples:
        total.update(len(sample).to_bytes(8, "little"))
        total.update(np.ascontiguousarray(sample, dtype="<i8").tobytes())
    return total.hexdigest()
