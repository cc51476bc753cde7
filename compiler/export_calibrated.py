"""Exports a model after calibrated quantisation: each checkpoint tensor's part of the fused matrices that were quantised."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from ..codegen import make_backend
from ..codegen.export.compressed_config import Activations
from ..formats.grid import Grid, QuantizedMatrix
from ..passes.graph import WeightTable
from ..quantization.report import QuantizationReport
from ..targets import resolve_target
from .calibrate import Calibrated, TargetQuantizer
from .checkpoint import Checkpoint
from .export import CheckpointModel
from .options import CompileOptions, QuantizationOptions
from .progress import Progress
from .trace import trace

if TYPE_CHECKING:
    import torch


_TARGETS: Final[dict[Activations, str]] = {"16-bit": "cpu-int8", "int8": "a100-int8", "fp8": "h100-fp8"}


class QuantizedExport(CheckpointModel):
    """A checkpoint with the matrices of a quantiser, and float tensors rescaled as those need them.

    With `head`, an embedding that was quantised is exported so; otherwise the exporter chooses its format.
    """

    def __init__(self, checkpoint: Checkpoint, table: WeightTable, done: Calibrated, *, head: bool) -> None:
        super().__init__(checkpoint)
        self._quantized = done.model
        self._places: dict[str, tuple[str, int, int]] = {}  # source -> graph weight, first row, row after the last
        records = {record.name: record for record in done.model.records}
        self._grids: dict[str, Grid] = {}
        self._steps: dict[str, float] = {}
        for name, weight in table.items():
            first = 0
            for source in weight.sources:
                stop = first + checkpoint.shape(source)[0] if source in checkpoint.tensor_names() else first
                record = records.get(name)
                grid = Grid.parse(record.format) if record is not None else None
                if grid is not None and (head or ".layers." in name):
                    self._places[source], self._grids[source] = (name, first, stop), grid
                if record is not None and record.input_step is not None:
                    self._steps[source] = record.input_step
                first = stop

    def tensor(self, name: str) -> torch.Tensor:
        return self._quantized.rescaling.apply(name, super().tensor(name))

    def grid(self, name: str) -> Grid | None:
        return self._grids.get(name)

    def input_step(self, name: str) -> float | None:
        return self._steps.get(name)

    def quantized(self, name: str) -> QuantizedMatrix:
        weight, first, stop = self._places[name]
        matrix = self._quantized.matrix(weight)
        assert matrix is not None, f"{weight} was quantised"
        return matrix.rows(first, stop)


def quantize_for_export(
    checkpoint: Checkpoint,
    grid: Grid | None,
    activations: Activations,
    options: QuantizationOptions,
    output: Path,
    progress: Progress,
    *,
    head: bool,
) -> tuple[QuantizedExport, QuantizationReport, TargetQuantizer]:
    """Quantise the layers as a target does that has those weights and activations; the `grid` is that of 16-bit ones.

    The last of the three owns the work folder, to be removed when the export is done.
    """
    target = _TARGETS[activations]
    quantization = None if activations != "16-bit" or grid is None else str(grid) if grid.group else "int8-channel"
    compile_options = CompileOptions(model=str(checkpoint.path), target=target, quantization=quantization, quantize=options)
    quantizer = TargetQuantizer(
        checkpoint, trace(checkpoint.config), compile_options, output.absolute().with_name(f".{output.name}.quantized"), progress
    )
    program = compile_options.program_options()
    done = quantizer.run(make_backend(resolve_target(target), program), program)
    return QuantizedExport(checkpoint, quantizer.model.table, done, head=head), done.report, quantizer
