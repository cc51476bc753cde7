"""Quantises a model for one target: calibration texts, formats within limits, layers in order, and what the result is worth."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, fx

from ..codegen import Backend, ProgramOptions, make_backend
from ..errors import CapacityError, QualityError, UsageError
from ..passes.graph import WeightTable, copy_module, shape
from ..passes.pipelines import calibration_pipeline
from ..passes.quantize import Quantize
from ..quantization.allocate import Allocation, Choice, allocate
from ..quantization.build_memory import BuildMemory
from ..quantization.calibration.calibration import Calibration, CalibrationWarning
from ..quantization.calibration.detectors import few_tokens, surprise
from ..quantization.calibration.load import load_calibration
from ..quantization.kv_sensitivity import KvLayer, attention_nodes, measure_kv, set_kv_format
from ..quantization.layerwise import Forward, Step, make_steps
from ..quantization.method import Method
from ..quantization.probe import Probe
from ..quantization.quality import Quality, QualityMeter
from ..quantization.quantized_model import QuantizedModel
from ..quantization.quantizer import Quantizer
from ..quantization.report import QuantizationReport
from ..quantization.sensitivity import Sensitivity, format_bytes, measure_sensitivities
from ..quantization.smoothquant import strength_for
from ..quantization.work_folder import WorkFolder
from ..runtime.program import kv_head_bytes
from .checkpoint import Checkpoint
from .options import AUTO, CompileOptions
from .progress import Progress
from .weights import WeightStore

_PROBE_SHARE = 16  # one of so many samples measures the result,
_PROBE_SAMPLES = 4  # and so many at least
_MARGIN = 0.9  # of --max-kl that is aimed at: the gate measures other texts than the sensitivities
_ROUNDS = 4
_SENSITIVITY_ROWS = 256  # positions that each matrix's effect is measured on
_KV_TOKENS = 4096  # of the sequence whose KV cache counts as memory
_KV_KL = 0.01  # what the KV cache may add where no limit is given
_CACHED_BYTES = 2 << 30  # of a model that is kept in memory: sensitivities read every weight once for each matrix before it


@dataclass(slots=True)
class Calibrated:
    """A target whose weights are quantised: the back end with the formats chosen, the weights, the report."""

    backend: Backend
    model: QuantizedModel
    report: QuantizationReport
    probe: Probe


class TargetQuantizer:
    """Quantises one checkpoint for one back end after the other; calibration and the float model's logits are made once."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        traced: fx.GraphModule,
        options: CompileOptions,
        work_folder: Path,
        progress: Progress,
    ) -> None:
        self.checkpoint = checkpoint
        self.traced = traced
        self.options = options.quantize
        self.chooses_kv = options.kv_dtype == AUTO
        self.progress = progress
        self.method = Method.parse(self.options.method or ("gptq" if self.options.calibrates else "rtn"))
        self.store = WeightStore(checkpoint)
        self.module = self._graph()
        self.steps = make_steps(self.module)
        self.table = WeightTable.of(self.module)
        fits = 4 * sum(weight.num_elements for weight in self.table.values()) <= _CACHED_BYTES
        self.read = lru_cache(maxsize=None)(self._read_float) if fits else self._read_float
        self.calibration = self._load_calibration()
        tokens = [torch.from_numpy(sample) for sample in self.calibration.samples]
        held_out = max(_PROBE_SAMPLES, len(tokens) // _PROBE_SHARE)
        probe, self.samples = (tokens[:held_out], tokens[held_out:]) if len(tokens) > held_out else (tokens, tokens)
        self.build_memory, spills = self._plan_memory()
        self.probe = Probe.make(self.module, self.steps, probe, self.read)
        if (doubt := self._surprise()) is not None:
            self.calibration = replace(self.calibration, warnings=(*self.calibration.warnings, doubt))
        self.work = WorkFolder(work_folder, self._key(), resume=self.options.resume)
        self.spill = self.work.path if spills else None
        self._sensitivities: dict[str, Sensitivity] = {}
        self._kv: list[KvLayer] = []

    def _plan_memory(self) -> tuple[BuildMemory, bool]:
        """What quantising takes, and whether activations have to go to files. Raises CapacityError where even that is too much."""
        limit = self.options.max_build_memory
        whole = self.method.rounding in ("gptq", "autoround") or self.method.equalisation == "awq"
        for spilled in (False, True):
            found = BuildMemory.estimate(self.table, self.steps, self.samples, whole_moments=whole, spilled=spilled)
            if limit is None or found.total <= limit:
                return found, spilled
        raise CapacityError(
            f"--max-build-memory {limit}: method {self.method} on this model takes up to {found.total} bytes: "
            + ", ".join(f"{name} {size}" for name, size in found.as_json().items() if name != "total")
            + "; allow that many, or choose rtn"
        )

    def run(self, backend: Backend, program_options: ProgramOptions) -> Calibrated:
        """Choose formats, quantise, measure; with `max_kl`, as often as it takes to keep to it.

        Raises `QualityError` with the nearest figures where the limits cannot be met.
        """
        defaults = self._default_formats(backend)
        limited = self.options.max_kl is not None or self.options.memory_budget is not None
        factor = 1.0
        for number in range(1, _ROUNDS + 1):
            chosen_formats = self._allocate(backend, factor).formats() if limited else {}
            kv_layers = self._kv_layers(backend, chosen_formats)
            formats = {name: format for name, format in chosen_formats.items() if name in defaults} or defaults
            chosen = make_backend(
                backend.target, replace(program_options, formats=formats if limited else {}, kv_layers=kv_layers)
            )
            self.progress.stage(f"quantize round {number}" if number > 1 else "quantize")
            model, quantizer = self._quantize(chosen, formats)
            for (_, node), format in zip(attention_nodes(quantizer.steps), kv_layers or (), strict=False):
                set_kv_format(node, format)
            self.progress.stage("measure")
            quality = self.probe.compare(
                self.probe.finish(Forward(quantizer.module, quantizer.steps, self.probe.samples), 0, quantizer.read)
            )
            report = self._report(model, quality, number, kv_layers or ())
            if self.options.max_kl is None or quality.kl_mean <= self.options.max_kl:
                return Calibrated(chosen, model, report, self.probe)
            if not limited:
                break
            predicted = sum(choice.kl for choice in self._allocate(backend, factor).choices.values())
            factor *= max(quality.kl_mean / max(predicted, 1e-9), 1.05)
        raise QualityError(
            f"--max-kl {self.options.max_kl:g}: the nearest allocation found has a mean KL of {quality.kl_mean:.4g} after {number} rounds; "
            "allow more, or raise --memory-budget"
        )

    def noise_floor(self) -> Quality:
        """The float model run with every value rounded to float16, against the same in bfloat16."""
        logits = []
        for dtype in (torch.bfloat16, torch.float16):

            def rounded(node: fx.Node, value: Tensor, dtype: torch.dtype = dtype) -> Tensor:
                return value.to(dtype).float() if isinstance(value, Tensor) and value.is_floating_point() else value

            def read(name: str, dtype: torch.dtype = dtype) -> Tensor:
                return self.read(name).to(dtype).float()

            logits.append(self.probe.finish(Forward(self.module, self.steps, self.probe.samples), 0, read, rounded))
        meter = QualityMeter()
        for sample, rows, a, b in zip(self.probe.samples, self.probe.rows, *logits, strict=True):
            meter.add(a, b, sample[rows + 1])
        return meter.result()

    def _graph(self) -> fx.GraphModule:
        module = copy_module(self.traced)
        for step in calibration_pipeline():
            step.run(module)
        return module

    def _read_float(self, name: str) -> Tensor:
        return self.table.constants[name] if name in self.table.constants else self.store.read(self.table[name])

    def _load_calibration(self) -> Calibration:
        options = self.options
        found = self._load(options.calibration, options.calibration_samples, options.calibration_length)
        width = max(step.source.meta["val"].shape[-1] for step in self.steps if step.source is not None)
        doubt = few_tokens(found.num_tokens, width)
        return replace(found, warnings=(*found.warnings, *([doubt] if doubt else [])))

    def _load(self, source: Path | None, num_samples: int, max_length: int) -> Calibration:
        with tempfile.TemporaryDirectory(prefix="llmc-tokenizer-") as name:
            folder = Path(name) if self.checkpoint.has_tokenizer else None
            if folder is not None:
                self.checkpoint.write_tokenizer(folder)
            return load_calibration(
                source, folder, vocab_size=self.checkpoint.config.vocab_size, num_samples=num_samples, max_length=max_length
            )

    def _surprise(self) -> CalibrationWarning | None:
        """Whether the model expects the user's texts far less than the built-in ones."""
        if self.options.calibration is None or not self.checkpoint.has_tokenizer:
            return None
        samples = [torch.from_numpy(sample) for sample in self._load(None, _PROBE_SAMPLES, 128).samples]
        builtin = Probe.make(self.module, self.steps, samples, self.read, _SENSITIVITY_ROWS)
        return surprise(self.probe.reference_nll(), builtin.reference_nll())

    def _default_formats(self, backend: Backend) -> dict[str, str]:
        module = copy_module(self.module)
        Quantize(backend.quantization).run(module)
        table = WeightTable.of(module)
        return {name: table[name].format for step in self.steps for name in step.weights()}

    def _allocate(self, backend: Backend, factor: float) -> Allocation:
        sensitivities = self._measured(backend)
        options = self.options
        choices: dict[str, list[Choice]] = {name: s.choices(factor) for name, s in sensitivities.items()}
        if self.chooses_kv:
            choices |= {_kv_part(kv.layer): kv.choices(self._context) for kv in self._measured_kv(backend)}
        max_bytes = None
        if options.memory_budget is not None:
            max_bytes = options.memory_budget - self._fixed_bytes(backend)
        found = allocate(choices, max_bytes=max_bytes, max_kl=None if options.max_kl is None else options.max_kl * _MARGIN)
        if max_bytes is not None and found.num_bytes > max_bytes:
            raise QualityError(
                f"--memory-budget {options.memory_budget}: the smallest this model gets is "
                f"{found.num_bytes + self._fixed_bytes(backend)} bytes, with an expected mean KL of {found.kl:.3g}; allow that many"
            )
        return found

    def _fixed_bytes(self, backend: Backend) -> int:
        """Vectors, which stay in float32, and, unless it is chosen with them, the KV cache of one sequence."""
        vectors = sum(4 * weight.num_elements for weight in self.table.values() if len(weight.shape) == 1)
        return vectors if self.chooses_kv else vectors + self._kv_bytes(backend)

    @property
    def _context(self) -> int:
        """Tokens of the sequence whose KV cache counts."""
        return min(_KV_TOKENS, int(self.checkpoint.config.max_position_embeddings))

    def _kv_bytes(self, backend: Backend) -> int:
        """The KV cache of one sequence in the back end's default dtype."""
        keys = [shape(cast(fx.Node, node.args[1])) for _, node in attention_nodes(self.steps)]
        return sum(2 * heads * self._context * kv_head_bytes(backend.kv_candidates[-1], dim) for _, heads, _, dim in keys)

    def _kv_layers(self, backend: Backend, formats: Mapping[str, str]) -> tuple[str, ...] | None:
        """A KV dtype for each layer: what was chosen along with the weights, or the fewest bytes that add little; None for the default."""
        if not self.chooses_kv:
            return None
        layers = self._measured_kv(backend)
        if not formats:
            formats = allocate({_kv_part(kv.layer): kv.choices(self._context) for kv in layers}, max_kl=_KV_KL).formats()
        return tuple(formats[_kv_part(kv.layer)] for kv in layers)

    def _measured_kv(self, backend: Backend) -> list[KvLayer]:
        if not self._kv:
            self.progress.stage("KV sensitivities")
            candidates = backend.kv_candidates
            if len(candidates) == 1:
                raise UsageError(
                    f"target {backend.target.name!r}: --kv-dtype {AUTO} chooses for each layer, but all layers of a GPU program share one; "
                    "name a dtype"
                )
            self._kv = measure_kv(self.module, self.steps, self.probe.thinned(_SENSITIVITY_ROWS), candidates, self.read)
        return self._kv

    def _measured(self, backend: Backend) -> dict[str, Sensitivity]:
        if not self._sensitivities:
            self.progress.stage("sensitivities")
            self._sensitivities = measure_sensitivities(
                self.module,
                self.steps,
                self.probe.thinned(_SENSITIVITY_ROWS),
                backend.candidates,
                self.read,
                lambda value, format: torch.from_numpy(backend.decode_matrix(value.numpy(), format)),
                self.progress.done,
            )
        return self._sensitivities

    def _quantize(self, backend: Backend, formats: Mapping[str, str]) -> tuple[QuantizedModel, Quantizer]:
        def on_step(step: Step) -> None:
            self.progress.done(f"quantized {', '.join(step.weights()) or 'the end'}")

        quantizer = Quantizer(
            self._graph(),
            formats,
            self.method,
            self.samples,
            sources=self.store,
            read=self.store.read,
            decode=backend.decode_matrix,
            work=self.work,
            strength=strength_for(str(self.checkpoint.config.model_type)),
            spill=self.spill,
            on_step=on_step,
        )
        return quantizer.run(), quantizer

    def _key(self) -> dict[str, object]:
        """What the parts of the work folder depend on beside formats."""
        files = sorted(p for p in self.checkpoint.path.rglob("*") if p.is_file()) if self.checkpoint.path.is_dir() else []
        stats = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files or [self.checkpoint.path]]
        return {
            "model": [list(stat) for stat in stats],
            "layers": int(self.checkpoint.config.num_hidden_layers),
            "method": str(self.method),
            "calibration": self.calibration.digest,
        }

    def _report(self, model: QuantizedModel, quality: Quality, rounds: int, kv_layers: Sequence[str]) -> QuantizationReport:
        formats = {record.name: record.format for record in model.records}
        shapes = {name: (self.table[name].shape[0], self.table[name].shape[1]) for name in formats}
        return QuantizationReport(
            method=str(self.method),
            calibration=self.calibration.source,
            calibration_tokens=self.calibration.num_tokens,
            calibration_digest=self.calibration.digest,
            warnings=[str(warning) for warning in self.calibration.warnings] + model.warnings,
            records=model.records,
            shapes=shapes,
            sensitivities=self._sensitivities,
            max_kl=self.options.max_kl,
            memory_budget=self.options.memory_budget,
            memory_bytes=sum(format_bytes(format, *shapes[name]) for name, format in formats.items()),
            rounds=rounds,
            kv_layers=kv_layers,
            build_memory=self.build_memory,
            quality=quality,
            noise_floor=self.noise_floor(),
        )


def _kv_part(layer: int) -> str:
    """The name of a layer's KV cache among the parts of an allocation."""
    return f"kv.{layer}"
