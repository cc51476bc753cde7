"""Quantises a model layer by layer: each layer sees its inputs as the quantised layers before it make them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, fx

from ..formats.floats import Array
from ..formats.grid import Grid, QuantizedMatrix
from ..formats.static_step import LARGEST, split_step, with_step
from ..passes.dialect import LINEARS, llmc
from ..passes.graph import Weight, WeightTable, calls, weight_argument
from .calibration import layer_detectors as detectors
from .equalise import equalise
from .layerwise import Forward, Step, linear_weight, make_steps
from .method import Method
from .pairs import AbsorbPair, find_pairs
from .quantized_model import MatrixRecord, QuantizedModel
from .rescale import Rescaling, SourceTensors, prove
from .rounding import RoundingNotes, output_losses, round_matrix
from .second_moment import SecondMoment
from .static_steps import find_step
from .work_folder import Part, WorkFolder

_HELD_OUT = 8  # every so many samples one is kept from the methods, to measure what they lose


class FloatWeights(Protocol):
    """Reads a graph weight in float32, rescaled."""

    def __call__(self, weight: Weight, rescaling: Rescaling) -> Tensor:
        """The stacked weight."""
        ...


class Quantizer:
    """One run over one calibration graph (`calibration_pipeline`)."""

    def __init__(
        self,
        module: fx.GraphModule,
        formats: Mapping[str, str],
        method: Method,
        samples: Sequence[Tensor],
        *,
        sources: SourceTensors,
        read: FloatWeights,
        decode: Callable[[Array, str], Array],
        work: WorkFolder,
        strength: float,
        static_inputs: bool = False,
        spill: Path | None = None,
        on_step: Callable[[Step], object] = lambda step: None,
    ) -> None:
        """`formats` names every matrix's stored format; `samples` are token ids `[T]`; `decode` rounds to formats without a grid.

        `strength` is SmoothQuant's alpha; with `static_inputs`, linears that round their inputs to 8 bits get one step for all tokens;
        `spill` is a folder for activations that shall not stay in memory; `on_step` is told of each step when it is done.
        """
        self.module = module
        self.table = WeightTable.of(module)
        self.formats = dict(formats)
        self.method = method
        learns = method.needs_calibration or static_inputs
        self.samples = samples if learns else samples[::_HELD_OUT]  # the rest would be run for nothing
        self.holds_out = learns and len(samples) >= _HELD_OUT
        self.sources = sources
        self.read_float = read
        self.decode = decode
        self.work = work
        self.strength = strength
        self.static_inputs = static_inputs
        self.spill = spill
        self.on_step = on_step
        self.steps = make_steps(module)
        self.pairs = find_pairs(module).pairs if method.equalisation else ()
        self.result = QuantizedModel()
        self._made_from: list[object] = []

    def run(self) -> QuantizedModel:
        """Quantise everything that has a grid."""
        for pair in self.pairs:
            prove(self.module, pair, self.sources)
        self._set_formats(self.formats)
        self._quantize_tied_head()
        forward = self._forward()
        layers = sorted({step.layer for step in self.steps})
        for layer in layers:
            steps = [step for step in self.steps[:-1] if step.layer == layer]  # the last would make the logits of every token
            names = [name for step in steps for name in step.weights() if name not in self.result.parts]
            self._made_from.append([[name, self.formats[name]] for name in names])
            part = self.work.part(f"layer-{layer:04d}", self._made_from)
            if part.exists:
                self._take(part)
                for step in steps:
                    forward.run(step, self.read)
            else:
                self._quantize_layer(layer, steps, forward, part)
        return self.result

    def _forward(self) -> Forward:
        return Forward(self.module, self.steps, self.samples, self.spill)

    def read(self, name: str) -> Tensor:
        """A weight as the quantised model computes with it; float where it is not quantised yet."""
        if name in self.table.constants:
            return self.table.constants[name]
        matrix = self.result.matrix(name)
        if matrix is not None:
            return torch.from_numpy(matrix.dequantize())
        value = self._float(name)
        format = split_step(self.formats.get(name, "f32"))[0]
        if value.dim() == 2 and Grid.parse(format) is None and format != "f32":
            return torch.from_numpy(self.decode(value.numpy(), format))
        return value

    def _float(self, name: str) -> Tensor:
        return self.read_float(self.table[name], self.result.rescaling)

    def _quantize_layer(self, layer: int, steps: Sequence[Step], forward: Forward, part: Part) -> None:
        arrays: dict[str, Array] = {}
        warnings: list[str] = []
        if self.method.equalisation:
            rescaling, warnings = self._equalise(layer, steps, forward.fork())
            arrays = {f"rescaling/{name}": array for name, array in rescaling.to_arrays().items()}
            self.result.rescaling = self.result.rescaling.then(rescaling)
        matrices: dict[str, QuantizedMatrix] = {}
        records: list[MatrixRecord] = []

        def read(name: str) -> Tensor:
            return torch.from_numpy(matrices[name].dequantize()) if name in matrices else self.read(name)

        for step in steps:
            forward.run(step, read)
            if self.static_inputs:
                self._set_formats(self._find_input_steps(step, forward))
            moment = self._moment(step, forward)
            for name in step.weights():
                if name not in self.result.parts:
                    record, matrix, doubts = self._round(name, step, forward, moment)
                    records.append(record)
                    warnings += doubts
                    if matrix is not None:
                        matrices[name] = matrix
            self.on_step(step)
        part.write(matrices, arrays, {"records": [asdict(record) for record in records], "warnings": warnings})
        self._take(part, rescaled=True)

    def _round(
        self, name: str, step: Step, forward: Forward, moment: SecondMoment | None
    ) -> tuple[MatrixRecord, QuantizedMatrix | None, list[str]]:
        format, input_step = split_step(self.formats[name])
        grid = Grid.parse(format)
        if grid is None or moment is None or step.source is None:
            return MatrixRecord(name=name, format=format, layer=step.layer, input_step=input_step), None, []
        w = self._float(name)
        matrix, notes = round_matrix(w, grid, self.method.rounding, moment)
        held_out = (x for index, x in enumerate(forward.values(step.source)) if self._is_held_out(index))
        loss, rtn_loss = output_losses(w, matrix, held_out)
        record = MatrixRecord(
            name=name,
            format=str(grid),
            layer=step.layer,
            loss=loss,
            rtn_loss=rtn_loss,
            tokens=moment.tokens,
            input_step=input_step,
        )
        return record, matrix, _doubts(record, moment, notes, self.method)

    def _moment(self, step: Step, forward: Forward) -> SecondMoment | None:
        """Statistics of the value that a step's linears read; None where nothing of them is to be rounded."""
        wanted = [name for name in step.weights() if name not in self.result.parts and self._grid(name)]
        if step.source is None or not wanted:
            return None
        whole = self.method.rounding in ("gptq", "autoround")
        return self._measure(step, forward, wanted[0], diagonal_only=not whole)

    def _measure(self, step: Step, forward: Forward, name: str, *, diagonal_only: bool) -> SecondMoment:
        assert step.source is not None
        moment = SecondMoment(int(step.source.meta["val"].shape[-1]), name=name, diagonal_only=diagonal_only)
        for value in self._calibration_values(step, forward):
            moment.update(value)
        return moment

    def _calibration_values(self, step: Step, forward: Forward) -> Iterator[Tensor]:
        """The value that a step's linears read, `[T, width]` for each sample that is not held out."""
        assert step.source is not None
        for index, value in enumerate(forward.values(step.source)):
            if not (self.holds_out and self._is_held_out(index)):
                yield value

    def _find_input_steps(self, step: Step, forward: Forward) -> dict[str, str]:
        """Formats with a step for the linears that round their inputs to 8 bits; those of one format that read one value share it."""
        found: dict[str, str] = {}
        for format in sorted({self.formats[name] for name in step.weights()} & LARGEST.keys()):
            names = [name for name in step.weights() if self.formats[name] == format]
            size = find_step(lambda: self._calibration_values(step, forward), map(self._float, names), format)
            found |= dict.fromkeys(names, with_step(format, size))
        return found

    def _set_formats(self, formats: Mapping[str, str]) -> None:
        """Round the inputs of these matrices as their formats say, from here on."""
        self.formats |= formats
        for node in calls(self.module, *LINEARS):
            name = linear_weight(node)
            if name in formats:
                node.args = (*node.args[:-1], formats[name])

    def _grid(self, name: str) -> Grid | None:
        return Grid.parse(split_step(self.formats[name])[0])

    def _is_held_out(self, index: int) -> bool:
        return not self.holds_out or index % _HELD_OUT == 0

    def _equalise(self, layer: int, steps: Sequence[Step], forward: Forward) -> tuple[Rescaling, list[str]]:
        """Scales for the pairs whose consumers are in this layer, from a run of the layer in float."""
        assert self.method.equalisation is not None
        names = {name for step in steps for name in step.weights()}
        pairs: list[AbsorbPair] = [pair for pair in self.pairs if names.issuperset(pair.consumers)]
        wanted = {pair.consumers[0] for pair in pairs}
        moments: dict[str, SecondMoment] = {}
        inputs: dict[str, Tensor] = {}
        for step in steps:
            forward.run(step, self._read_unrounded)
            for name in wanted.intersection(step.weights()):
                moments[name] = self._measure(step, forward, name, diagonal_only=self.method.equalisation == "smoothquant")
                assert step.source is not None
                inputs[name] = next(forward.values(step.source))
        return equalise(
            self.method.equalisation,
            pairs,
            moments,
            inputs,
            self.formats,
            self._float,
            self.table,
            self.sources.shape,
            strength=self.strength,
        )

    def _read_unrounded(self, name: str) -> Tensor:
        return self.read(name) if name in self.table.constants or name in self.result.parts else self._float(name)

    def _quantize_tied_head(self) -> None:
        """A head that is also the embedding is needed first but read last: its inputs are measured in a run of the float model."""
        embeddings = {str(weight_argument(node, 0).target) for node in calls(self.module, llmc.embedding.default)}
        step = self.steps[-2]
        tied = [name for name in step.weights() if name in embeddings and self._grid(name)]
        if not tied:
            return
        self._made_from.append([[name, self.formats[name]] for name in tied])
        part = self.work.part("head", self._made_from)
        if not part.exists:
            forward = self._forward()
            for each in self.steps[:-1]:
                forward.run(each, self._read_unrounded)
            record, matrix, doubts = self._round(tied[0], step, forward, self._moment(step, forward))
            assert matrix is not None
            part.write({tied[0]: matrix}, {}, {"records": [asdict(record)], "warnings": doubts})
        self._take(part)

    def _take(self, part: Part, *, rescaled: bool = False) -> None:
        """Add what a part holds to the result."""
        found = part.record()
        records = [MatrixRecord(**fields) for fields in found["records"]]
        self.result.records += records
        self.result.warnings += found["warnings"]
        self._set_formats({r.name: with_step(self.formats[r.name], r.input_step) for r in records if r.input_step})
        for name in part.names():
            self.result.parts[name] = part
        arrays = {name.removeprefix("rescaling/"): array for name, array in part.arrays().items()}
        if arrays and not rescaled:
            self.result.rescaling = self.result.rescaling.then(Rescaling.from_arrays(arrays))


def _doubts(record: MatrixRecord, moment: SecondMoment, notes: RoundingNotes, method: Method) -> list[str]:
    """Warnings about one matrix by the names of the detectors."""
    halves = moment.half_amax.numpy()
    found = [
        detectors.dead_columns(record.name, moment.importance.numpy()),
        detectors.split_half(record.name, halves[0], halves[1]) if moment.samples > 1 else None,
        detectors.damping_retries(record.name, notes.damping_retries, notes.damping),
    ]
    if method.needs_calibration and record.loss is not None and record.rtn_loss is not None and record.loss > 0:
        found.append(detectors.not_better_than_rtn(record.name, str(method), record.loss, record.rtn_loss))
    return [str(warning) for warning in found if warning is not None]
