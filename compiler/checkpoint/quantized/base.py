"""What a checkpoint says about its quantised weights: matrices kept as stored, and a summary of what is kept and what is not."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from ....formats.floats import Float32, Fp8Matrix
from ....formats.grid import QuantizedMatrix

StoredMatrix: TypeAlias = "QuantizedMatrix | Fp8Matrix"
"""A quantised weight as the checkpoint stores it, ready to be packed without another rounding of its codes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredKind:
    """How some matrices are stored, and what becomes of them."""

    stored: str  # "4 bits in groups of 128, symmetric", "Q4_K"
    bits: int
    group: int | None  # columns that share a scale; None where it is a row or more
    kept_as: str | None  # the name of a `Grid`, or "fp8"; None: converted to float32 and then to the target's format
    remark: str = ""  # what keeping rounds, or why they are converted

    def __str__(self) -> str:
        fate = f"kept as {self.kept_as}" if self.kept_as else "converted"
        return f"{self.stored}: {fate}" + (f" ({self.remark})" if self.remark else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredQuantization:
    """A checkpoint's quantisation: parameter names by kind, how many matrices are not quantised, and what a user should know."""

    method: str  # "awq", "gptq", "fp8", "compressed-tensors", "gguf"
    tensors: Mapping[StoredKind, tuple[str, ...]]
    plain: int
    notes: tuple[str, ...] = field(default=())

    @property
    def kept(self) -> int:
        """Matrices whose codes a target may use as they are."""
        return sum(len(names) for kind, names in self.tensors.items() if kind.kept_as)

    @property
    def converted(self) -> int:
        """Quantised matrices that are read as float32."""
        return sum(len(names) for kind, names in self.tensors.items() if not kind.kept_as)

    def lines(self) -> list[str]:
        """One line on the whole, one for each kind of matrix, one for each note."""
        total = self.kept + self.converted
        lines = [f"{self.method}: {total} of {total + self.plain} matrices are quantised"]
        for kind, names in self.tensors.items():
            roles = sorted({name.removesuffix(".weight").rpartition(".")[2] for name in names})
            lines.append(f"{len(names)} x {', '.join(roles)}: {kind}")
        return [*lines, *self.notes]


class QuantizedWeight(ABC):
    """One quantised matrix of a checkpoint. Headers are checked when it is made, values when they are read."""

    shape: tuple[int, int]  # N, K
    stored_type: str  # "INT4", "F8_E4M3", "Q4_K"

    @abstractmethod
    def kind(self) -> StoredKind:
        """How it is stored and whether it can be kept; reads scales, not codes. Raises `CheckpointError` for damaged values."""

    @abstractmethod
    def matrix(self) -> StoredMatrix | None:
        """The matrix as stored, None where `kind` says that it is converted. Raises `CheckpointError` for damaged values."""

    @abstractmethod
    def dequantize(self) -> Float32:
        """The values `[N, K]` in float32, computed from what is stored without any rounding of scales."""


def summarize(method: str, weights: Mapping[str, QuantizedWeight], plain: int, notes: tuple[str, ...]) -> StoredQuantization:
    """The summary of `weights`, by parameter name."""
    by_kind: dict[StoredKind, list[str]] = {}
    for name in sorted(weights):
        by_kind.setdefault(weights[name].kind(), []).append(name)
    ordered = sorted(by_kind.items(), key=lambda item: (-len(item[1]), str(item[0])))
    return StoredQuantization(method=method, tensors={kind: tuple(names) for kind, names in ordered}, plain=plain, notes=notes)
