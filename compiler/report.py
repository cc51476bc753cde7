"""What a compile did, in figures: for the terminal, for `--json`, and (without times) for the bundle's report folder."""

from __future__ import annotations

import resource
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from torch import fx

from ..codegen.cpu.program import CpuProgram
from ..passes.graph import operator_counts
from ..passes.manager import PassRecord
from .dump_ir import log


@dataclass(slots=True, kw_only=True)
class CompileReport:
    """Returned by `llmc.compile`; `output` is None after a dry run or `stop_after`."""

    model: str
    target: str
    architecture: str
    num_parameters: int
    output: Path | None = None
    passes: list[PassRecord] = field(default_factory=list)
    operators: dict[str, int] = field(default_factory=dict)
    weight_bytes: dict[str, int] = field(default_factory=dict)
    arena_bytes: int = 0
    kv_bytes_per_token: int = 0
    kernel_calls: dict[str, int] = field(default_factory=dict)
    libraries: dict[str, int] = field(default_factory=dict)
    verify_errors: dict[str, float] = field(default_factory=dict)
    stage_seconds: dict[str, float] = field(default_factory=dict)
    bundle_bytes: int = 0
    notes: list[str] = field(default_factory=list)

    def describe_program(self, program: CpuProgram, module: fx.GraphModule) -> None:
        """Take the figures of a lowered program."""
        weights: Counter[str] = Counter()
        for weight in program.weights:
            weights[str(weight.format) if weight.format else "vectors"] += weight.num_bytes()
        self.weight_bytes = dict(weights)
        self.arena_bytes = program.arena_bytes
        self.kv_bytes_per_token = program.kv_cache.bytes_per_block // program.kv_cache.block_size
        self.kernel_calls = {name: len(calls) for name, calls in program.phases.items()}
        self.operators = dict(sorted(operator_counts(module).items()))

    def reproducible(self) -> dict[str, object]:
        """Everything that the same inputs give again: no times, no memory peaks, no paths."""
        return {
            "model": self.model,
            "target": self.target,
            "architecture": self.architecture,
            "num_parameters": self.num_parameters,
            "passes": log(self.passes),
            "operators": self.operators,
            "weight_bytes": self.weight_bytes,
            "arena_bytes": self.arena_bytes,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "kernel_calls": self.kernel_calls,
        }

    def as_json(self) -> dict[str, object]:
        """The whole report, for `--json`."""
        return self.reproducible() | {
            "output": str(self.output) if self.output else None,
            "libraries": self.libraries,
            "bundle_bytes": self.bundle_bytes,
            "verify_errors": self.verify_errors,
            "notes": self.notes,
            "stage_seconds": {k: round(v, 3) for k, v in self.stage_seconds.items()},
            "pass_seconds": {r.name: round(r.seconds, 4) for r in self.passes},
            "peak_rss_bytes": peak_rss_bytes(),
        }


def peak_rss_bytes() -> int:
    """The largest resident size this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
