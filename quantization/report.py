"""What a calibrated quantisation did: each matrix with its format and losses, and the model's quality beside the noise floor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from .build_memory import BuildMemory
from .quality import Quality
from .quantized_model import MatrixRecord
from .sensitivity import Sensitivity, format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixRow:
    """A matrix as reports show it: `loss` and `rtn_loss` as in `MatrixRecord`; `kl_alone_int4` is the divergence that it alone on 4 bits
    causes, where that was measured; `input_step` is that of all its inputs where calibration has fixed one."""

    name: str
    layer: int
    format: str
    num_bytes: int
    loss: float | None
    rtn_loss: float | None
    kl_alone_int4: float | None
    input_step: float | None


@dataclass(slots=True, kw_only=True)
class QuantizationReport:
    """`quality` is of the quantised graph, `bundle_quality` of the finished bundle where it could be run, both on texts that nothing was
    fitted to; `noise_floor` is of the float model run in float16 against itself run in bfloat16."""

    method: str
    calibration: str
    calibration_tokens: int
    calibration_digest: str
    warnings: list[str] = field(default_factory=list)
    records: Sequence[MatrixRecord] = ()
    shapes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    sensitivities: Mapping[str, Sensitivity] = field(default_factory=dict)
    kv_layers: Sequence[str] = ()
    max_kl: float | None = None
    memory_budget: int | None = None
    memory_bytes: int = 0
    rounds: int = 1
    quality: Quality | None = None
    bundle_quality: Quality | None = None
    noise_floor: Quality | None = None
    build_memory: BuildMemory | None = None

    def matrices(self) -> list[MatrixRow]:
        """One row for each matrix, in the order of layers."""
        rows = []
        for record in sorted(self.records, key=lambda r: (r.layer, r.name)):
            sensitivity = self.sensitivities.get(record.name)
            rows.append(
                MatrixRow(
                    name=record.name,
                    layer=record.layer,
                    format=record.format,
                    num_bytes=format_bytes(record.format, *self.shapes[record.name]),
                    loss=_short(record.loss),
                    rtn_loss=_short(record.rtn_loss),
                    kl_alone_int4=_short(sensitivity.kl if sensitivity else None),
                    input_step=record.input_step,
                )
            )
        return rows

    def as_json(self) -> dict[str, object]:
        """Everything; reproducible."""
        qualities = {"quality": self.quality, "bundle_quality": self.bundle_quality, "noise_floor": self.noise_floor}
        return {
            "method": self.method,
            "calibration": self.calibration,
            "calibration_tokens": self.calibration_tokens,
            "calibration_digest": self.calibration_digest,
            "warnings": self.warnings,
            "max_kl": self.max_kl,
            "memory_budget_bytes": self.memory_budget,
            "memory_bytes": self.memory_bytes,
            "rounds": self.rounds,
            "kv_layers": list(self.kv_layers),
            "build_memory_bytes": self.build_memory.as_json() if self.build_memory else None,
            "matrices": [asdict(row) for row in self.matrices()],
            **{name: quality.as_json() for name, quality in qualities.items() if quality},
        }


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
