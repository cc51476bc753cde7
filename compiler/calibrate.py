"""Quantises a model for one target after the other: formats within limits, layers in order, and what the result is worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import fx

from ..codegen import Backend, ProgramOptions, make_backend
from ..errors import CapacityError, QualityError, UsageError
from ..formats.grid import Grid
from ..formats.static_step import LARGEST, split_step
from ..passes.graph import WeightTable, copy_module
from ..passes.quantize import Quantize
from ..quantization.build_memory import BuildMemory
from ..quantization.kv_sensitivity import attention_nodes, set_kv_format
from ..quantization.layerwise import Forward, Step
from ..quantization.method import Method
from ..quantization.probe import Probe
from ..quantization.quality import Quality
from ..quantization.quantized_model import QuantizedModel
from ..quantization.quantizer import Quantizer
from ..quantization.report import QuantizationReport
from ..quantization.sensitivity import format_bytes
from ..quantization.smoothquant import strength_for
from ..quantization.work_folder import WorkFolder
from .bit_budget import BitBudget
from .calibrated_model import CalibratedModel
from .checkpoint import Checkpoint
from .options import AUTO, CompileOptions
from .progress import Progress

_ROUNDS = 4
_LOOSE, _CLOSE = 0.5, 0.9  # shares of --max-kl: fewer bits are tried below the former, and taken if they stay below the latter


@dataclass(slots=True)
class Calibrated:
    """A target whose weights are quantised: the back end with the formats chosen, the weights, the report, what to judge it by."""

    backend: Backend
    model: QuantizedModel
    report: QuantizationReport
    probe: Probe


class TargetQuantizer:
    """Quantises one checkpoint; calibration and the float model's logits are made once for all targets."""

    def __init__(
        self, checkpoint: Checkpoint, traced: fx.GraphModule, options: CompileOptions, work_folder: Path, progress: Progress
    ) -> None:
        """Finished layers are kept in `work_folder`. Raises CapacityError where `max_build_memory` is too little."""
        self.options = options.quantize
        self.chooses_kv = options.kv_dtype == AUTO
        self.progress = progress
        self.method = Method.parse(self.options.method or ("gptq" if self.options.calibrates else "rtn"))
        self.model = CalibratedModel(checkpoint, traced, self.options)
        self.build_memory, spills = self._plan_memory()
        self.work = WorkFolder(work_folder, self._key(), resume=self.options.resume)
        self.spill = self.work.path if spills else None

    def run(self, backend: Backend, program_options: ProgramOptions) -> Calibrated:
        """Choose formats, quantise, measure; with `max_kl`, as often as it takes to keep to it.

        Raises `QualityError` with the nearest figures where the limits cannot be met, and `UsageError` for options that do nothing for
        this target; the finished layers are then of no use and go.
        """
        try:
            return self._run(backend, program_options)
        except (QualityError, UsageError):
            self.work.remove()
            raise

    def _run(self, backend: Backend, program_options: ProgramOptions) -> Calibrated:
        budget = BitBudget(self.model, backend, self.progress, chooses_kv=self.chooses_kv)
        default = self._default_formats(backend)
        self._check_use(backend.target.name, backend.candidates if budget.is_limited else tuple(default.values()))
        limit, factor = self.options.max_kl, 1.0
        best: Calibrated | None = None
        tried: object = None
        for number in range(1, _ROUNDS + 1):
            allocation = budget.allocate(factor) if budget.is_limited else None
            chosen = {} if allocation is None else budget.matrix_formats(allocation)
            kv_layers = budget.kv_layers(allocation)
            if best is not None and tried == (chosen, kv_layers):  # there is nothing smaller
                break
            tried = chosen, kv_layers
            formatted = make_backend(backend.target, replace(program_options, formats=chosen, kv_layers=kv_layers))
            self.progress.stage(f"quantize, round {number}" if number > 1 else "quantize")
            quantizer = self._quantizer(formatted, chosen or default)
            model = quantizer.run()
            if self.options.static_activations:
                steps = {name: format for name, format in quantizer.formats.items() if split_step(format)[1] is not None}
                formatted = make_backend(
                    backend.target, replace(program_options, formats=chosen | steps, kv_layers=kv_layers)
                )
            self.progress.stage("measure")
            quality = self._measure(quantizer, kv_layers or ())
            if limit is None or quality.kl_mean <= limit * (_CLOSE if best else 1.0):
                report = self._report(model, quality, number, kv_layers or (), budget)
                best = Calibrated(formatted, model, report, self.model.probe)
            if allocation is None or limit is None or self.options.memory_budget is not None:  # which is used up: nothing can be moved
                break
            found = quality.kl_mean / max(allocation.kl, 1e-9)
            if best is None:
                factor *= max(found, 1.05)
            elif best.report.quality is quality and quality.kl_mean < _LOOSE * limit and found < 1:
                factor *= found**0.5  # half of the way, for what errors do together grows faster than their sum
            else:
                break
        if best is not None:
            return best
        raise QualityError(
            f"--max-kl {limit:g}: the nearest allocation found has a mean KL of {quality.kl_mean:.4g} after {number} rounds; "
            "allow more, or raise --memory-budget"
        )

    def _check_use(self, target: str, formats: Sequence[str]) -> None:
        """Refuse options that do nothing for the formats that matrices of a target may have."""
        if self.options.static_activations and LARGEST.keys().isdisjoint(formats):
            raise UsageError(
                f"--static-activations: target {target} rounds no inputs to 8 bits; choose a scheme that does, int8 or fp8 on a GPU"
            )
        if self.options.method and self.method.rounding != "rtn" and not any(map(Grid.parse, formats)):
            raise UsageError(
                f"--method {self.method}: it rounds to integers, and target {target} stores none; choose rtn, or smoothquant+rtn"
            )

    def _plan_memory(self) -> tuple[BuildMemory, bool]:
        """What quantising takes, and whether activations have to go to files. Raises CapacityError where even that is too much."""
        limit, model = self.options.max_build_memory, self.model
        whole = self.method.rounding in ("gptq", "autoround") or self.method.equalisation == "awq"
        for spilled in (False, True):
            found = BuildMemory.estimate(model.table, model.steps, model.samples, whole_moments=whole, spilled=spilled)
            if limit is None or found.total <= limit:
                return found, spilled
        raise CapacityError(
            f"--max-build-memory {limit}: method {self.method} on this model takes up to {found.total} bytes: "
            + ", ".join(f"{name} {size}" for name, size in found.as_json().items() if name != "total")
            + "; allow that many, or choose rtn"
        )

    def _default_formats(self, backend: Backend) -> dict[str, str]:
        module = copy_module(self.model.module)
        Quantize(backend.quantization).run(module)
        table = WeightTable.of(module)
        return {name: table[name].format for step in self.model.steps for name in step.weights()}

    def _quantizer(self, backend: Backend, formats: Mapping[str, str]) -> Quantizer:
        def on_step(step: Step) -> None:
            self.progress.done(f"quantized {', '.join(step.weights()) or 'the end'}")

        return Quantizer(
            copy_module(self.model.module),
            formats,
            self.method,
            self.model.samples,
            sources=self.model.store,
            read=self.model.store.read,
            decode=backend.decode_matrix,
            work=self.work,
            strength=strength_for(str(self.model.checkpoint.config.model_type)),
            static_inputs=self.options.static_activations,
            spill=self.spill,
            on_step=on_step,
        )

    def _measure(self, quantizer: Quantizer, kv_layers: Sequence[str]) -> Quality:
        """The quality of the quantised graph with the KV caches chosen."""
        for (_, node), format in zip(attention_nodes(quantizer.steps), kv_layers, strict=False):
            set_kv_format(node, format)
        probe = self.model.probe
        return probe.compare(probe.finish(Forward(quantizer.module, quantizer.steps, probe.samples), 0, quantizer.read))

    def _key(self) -> dict[str, object]:
        """What the parts of the work folder depend on beside formats."""
        path = self.model.checkpoint.path
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        return {
            "model": [[p.name, p.stat().st_size, p.stat().st_mtime_ns] for p in files],
            "layers": int(self.model.checkpoint.config.num_hidden_layers),
            "method": str(self.method),
            "calibration": self.model.calibration.digest,
            "static_activations": self.options.static_activations,
        }

    def _report(
        self, model: QuantizedModel, quality: Quality, rounds: int, kv_layers: Sequence[str], budget: BitBudget
    ) -> QuantizationReport:
        table, calibration = self.model.table, self.model.calibration
        formats = {record.name: record.format for record in model.records}
        shapes = {name: (table[name].shape[0], table[name].shape[1]) for name in formats}
        return QuantizationReport(
            method=str(self.method),
            calibration=calibration.source,
            calibration_tokens=calibration.num_tokens,
            calibration_digest=calibration.digest,
            warnings=self.model.warnings + model.warnings,
            records=model.records,
            shapes=shapes,
            sensitivities=budget.sensitivities if budget.is_limited else {},
            max_kl=self.options.max_kl,
            memory_budget=self.options.memory_budget,
            memory_bytes=sum(format_bytes(format, *shapes[name]) for name, format in formats.items()),
            rounds=rounds,
            kv_layers=kv_layers,
            build_memory=self.build_memory,
            quality=quality,
            noise_floor=self.model.noise_floor,
        )
