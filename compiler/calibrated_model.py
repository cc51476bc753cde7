"""The unquantised model as quantisers see it: its calibration graph and weights, samples to learn from, and a probe to be judged by."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path

import torch
from torch import Tensor, fx

from ..passes.graph import WeightTable
from ..passes.pipelines import calibration_graph
from ..quantization.calibration.calibration import Calibration, CalibrationWarning
from ..quantization.calibration.detectors import few_tokens, surprise
from ..quantization.calibration.load import load_calibration
from ..quantization.layerwise import Forward, make_steps
from ..quantization.probe import Probe
from ..quantization.quality import Quality, QualityMeter
from .checkpoint import Checkpoint
from .options import QuantizationOptions
from .weights import WeightStore

_PROBE_SHARE = 16  # one of so many samples measures the result,
_PROBE_SAMPLES = 4  # and so many at least
_BUILTIN_LENGTH, _BUILTIN_ROWS = 128, 256  # of built-in texts, to compare the user's with
_CACHED_BYTES = 2 << 30  # of a model that is kept in memory: sensitivities read every weight once for each matrix before it


class CalibratedModel:
    """One checkpoint with its calibration. The float model's logits on the probe are computed when they are first asked for."""

    def __init__(self, checkpoint: Checkpoint, traced: fx.GraphModule, options: QuantizationOptions) -> None:
        self.checkpoint = checkpoint
        self.options = options
        self.store = WeightStore(checkpoint)
        self.module = calibration_graph(traced)
        self.steps = make_steps(self.module)
        self.table = WeightTable.of(self.module)
        fits = 4 * sum(weight.num_elements for weight in self.table.values()) <= _CACHED_BYTES
        self.read = lru_cache(maxsize=None)(self._read) if fits else self._read
        self.calibration = self._load_calibration()
        tokens = [torch.from_numpy(sample) for sample in self.calibration.samples]
        held_out = max(_PROBE_SAMPLES, len(tokens) // _PROBE_SHARE)
        enough = len(tokens) > held_out
        self.samples = tokens[held_out:] if enough else tokens
        self._probe_samples = tokens[:held_out] if enough else tokens

    @cached_property
    def probe(self) -> Probe:
        """Samples that nothing is fitted to."""
        return Probe.make(self.module, self.steps, self._probe_samples, self.read)

    def long_probe(self, length: int, max_rows: int) -> Probe:
        """The same samples joined to texts of `length` tokens, as far as the model's context allows, with so many rows in all."""
        tokens = torch.cat(self._probe_samples)
        length = min(length, int(self.checkpoint.config.max_position_embeddings))
        samples = [tokens[start : start + length] for start in range(0, len(tokens) - 1, length)]
        return Probe.make(self.module, self.steps, samples, self.read, max_rows)

    @cached_property
    def warnings(self) -> list[str]:
        """What is doubtful about the calibration."""
        doubts = [*self.calibration.warnings, self._surprise()]
        return [str(doubt) for doubt in doubts if doubt is not None]

    @cached_property
    def noise_floor(self) -> Quality:
        """The float model run with every value rounded to float16, against the same in bfloat16; what float16 cannot hold stays."""
        logits = []
        for dtype in (torch.bfloat16, torch.float16):

            def rounded(node: fx.Node, value: Tensor, dtype: torch.dtype = dtype) -> Tensor:
                return _to_precision(value, dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

            def read(name: str, dtype: torch.dtype = dtype) -> Tensor:
                return _to_precision(self.read(name), dtype)

            logits.append(self.probe.finish(Forward(self.module, self.steps, self.probe.samples), 0, read, rounded))
        meter = QualityMeter()
        for sample, rows, a, b in zip(self.probe.samples, self.probe.rows, *logits, strict=True):
            meter.add(a, b, sample[rows + 1])
        return meter.result()

    def _read(self, name: str) -> Tensor:
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
        samples = [torch.from_numpy(sample) for sample in self._load(None, _PROBE_SAMPLES, _BUILTIN_LENGTH).samples]
        builtin = Probe.make(self.module, self.steps, samples, self.read, _BUILTIN_ROWS)
        return surprise(self.probe.reference_nll(), builtin.reference_nll())


def _to_precision(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded to nearest in `dtype`, but for numbers beyond its range."""
    return torch.where(value.abs() <= torch.finfo(dtype).max, value.to(dtype).float(), value)
