"""What a compile did, in figures: for the terminal, for `--json`, and (without times) for the bundle's report folder."""

from __future__ import annotations

import resource
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from torch import fx

from ..codegen import LoweredProgram
from ..passes.graph import operator_counts
from ..passes.manager import PassRecord
from ..quantization.report import QuantizationReport
from .dump_ir import log


@dataclass(slots=True, kw_only=True)
class TargetReport:
    """What was done for one target; `floors` are the bytes, operations and least time of its kernel calls."""

    passes: list[PassRecord] = field(default_factory=list)
    operators: dict[str, int] = field(default_factory=dict)
    weight_bytes: dict[str, int] = field(default_factory=dict)
    arena_bytes: int = 0
    kv_bytes_per_token: int = 0
    kv_bytes_per_slot: int = 0
    kernel_calls: dict[str, int] = field(default_factory=dict)
    floors: list[dict[str, object]] = field(default_factory=list)
    binaries: dict[str, int] = field(default_factory=dict)
    verify_errors: dict[str, float] = field(default_factory=dict)

    def describe_program(self, program: LoweredProgram, module: fx.GraphModule) -> None:
        """Take the figures of a lowered program."""
        weights: Counter[str] = Counter()
        for weight in program.weights:
            weights[weight.kind] += weight.num_bytes()
        self.weight_bytes = dict(weights)
        self.arena_bytes = program.arena_bytes
        self.kv_bytes_per_token = program.kv_cache.bytes_per_token
        self.kv_bytes_per_slot = program.kv_cache.bytes_per_slot
        self.kernel_calls = dict(program.num_calls())
        self.operators = dict(sorted(operator_counts(module).items()))
        self.floors = program.floors()

    def reproducible(self) -> dict[str, object]:
        """Everything that the same inputs give again."""
        return {
            "passes": log(self.passes),
            "operators": self.operators,
            "weight_bytes": self.weight_bytes,
            "arena_bytes": self.arena_bytes,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "kv_bytes_per_slot": self.kv_bytes_per_slot,
            "kernel_calls": self.kernel_calls,
            "floors": self.floors,
        }

    def as_json(self) -> dict[str, object]:
        """All of it, for `--json`."""
        return self.reproducible() | {
            "binaries": self.binaries,
            "verify_errors": self.verify_errors,
            "pass_seconds": {r.name: round(r.seconds, 4) for r in self.passes},
        }


@dataclass(slots=True, kw_only=True)
class CompileReport:
    """Returned by `llmc.compile`; `output` is None after a dry run or `stop_after`. `weight_files` are bytes by path."""

    model: str
    architecture: str
    num_parameters: int
    targets: dict[str, TargetReport] = field(default_factory=dict)
    output: Path | None = None
    stage_seconds: dict[str, float] = field(default_factory=dict)
    weight_files: dict[str, int] = field(default_factory=dict)
    bundle_bytes: int = 0
    notes: list[str] = field(default_factory=list)
    quantization: dict[str, QuantizationReport] = field(default_factory=dict)

    def reproducible(self) -> dict[str, object]:
        """Everything that the same inputs give again: no times, no memory peaks, no paths."""
        return {
            "model": self.model,
            "architecture": self.architecture,
            "num_parameters": self.num_parameters,
            "targets": {name: target.reproducible() for name, target in self.targets.items()},
            "quantization": {name: part.as_json() for name, part in self.quantization.items()},
        }

    def as_json(self) -> dict[str, object]:
        """The whole report, for `--json`."""
        return self.reproducible() | {
            "targets": {name: target.as_json() for name, target in self.targets.items()},
            "output": str(self.output) if self.output else None,
            "weight_files": self.weight_files,
            "bundle_bytes": self.bundle_bytes,
            "notes": self.notes,
            "stage_seconds": {k: round(v, 3) for k, v in self.stage_seconds.items()},
            "peak_rss_bytes": peak_rss_bytes(),
        }


def peak_rss_bytes() -> int:
    """The largest resident size this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
