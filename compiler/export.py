"""Exports a checkpoint: its tensors and grids for the exporters, and the check that what they wrote is the same model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final, Literal

from ..codegen.export import ExportModel, ExportReport, check_new, export_compressed_tensors, export_gguf
from ..codegen.export.compressed_config import Activations
from ..errors import CheckpointError, LlmcError, UsageError, VerificationError
from ..formats.grid import BITS, GROUP_SIZES, Grid, QuantizedMatrix
from ..formats.round_to_nearest import round_to_nearest
from .checkpoint import Checkpoint, open_checkpoint
from .checkpoint.gguf_file import GgufCheckpoint
from .checkpoint.huggingface import HuggingFaceCheckpoint
from .options import QuantizationOptions
from .progress import Progress, Silent

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

Format = Literal["gguf", "compressed-tensors"]
FORMATS: Final[tuple[Format, ...]] = ("gguf", "compressed-tensors")

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_SAME_FIELDS: Final = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "sliding_window", "layer_types"),
    *("query_pre_attn_scalar", "rope_parameters"),
)
_SAMPLES: Final = (
    "The quick brown fox doesn't jump; it's 1234567 times too LAZY.",
    "  two spaces,\ttab\n\n\nthree lines  \n",
    "Größe naïve Ελλάδα Привет 你好 こんにちは 안녕 🙂👍🏽 x²≠y₁",
    "def f(x):\n    return x[0] == {'a': 1.5e-3}  # <b>ok</b>\r\n",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Options of `llmc export`; see its help for what each does."""

    model: str
    format: Format = "gguf"
    output: Path | None = None
    type: str | None = None
    head_type: str | None = None
    quantization: str | None = None
    quantize: QuantizationOptions = field(default_factory=QuantizationOptions)

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise UsageError(f"export format {self.format!r} is unknown; choose one of {', '.join(FORMATS)}")
        if self.format != "gguf" and (self.type is not None or self.head_type is not None):
            raise UsageError("export: --type and --head-type are for --format gguf; use --quantization")
        if self.format == "gguf" and self.activations != "16-bit":
            raise UsageError(f"export: GGUF has no {self.quantization!r}; choose a --type, or --format compressed-tensors")
        if self.quantize.static_activations and self.activations == "16-bit":
            raise UsageError("export: --static-activations is for --quantization w8a8 and fp8, which round activations to 8 bits")
        if self.quantization not in (None, "fp8") and self.grid is None:
            names = [str(Grid(bits=8)), "w8a8", "fp8", *(f"int{bits}-g{g}" for bits in BITS for g in GROUP_SIZES)]
            raise UsageError(
                f"export: quantization {self.quantization!r} is unknown; choose one of {', '.join(names)}, or add -asym"
            )

    @property
    def grid(self) -> Grid | None:
        """The grid of the layers' matrices."""
        return Grid.parse(self.quantization) if self.quantization is not None else None

    @property
    def calibrated_grid(self) -> Grid | None:
        """The grid that a calibrated quantisation of the layers aims at, None for fp8. Raises `UsageError` where a type has none."""
        if self.grid is not None or self.activations == "fp8":
            return self.grid
        if self.format != "gguf":
            return Grid(bits=4, group=128)
        grid = {None: "int4-g32", "Q4_0": "int4-g32", "Q5_0": "int5-g32", "Q8_0": "int8-g32"}.get(self.type)
        if grid is None:
            raise UsageError(
                f"export: --type {self.type} is on no grid that --method can aim at; choose Q4_0, Q5_0 or Q8_0, or a --quantization"
            )
        found = Grid.parse(grid)
        assert found is not None
        return found

    @property
    def activations(self) -> Activations:
        """What the exported model's kernels quantise their inputs to."""
        return "int8" if self.quantization == "w8a8" else "fp8" if self.quantization == "fp8" else "16-bit"


class CheckpointModel(ExportModel):
    """A checkpoint whose layers are rounded to nearest on `grid`; without one, the exporter chooses the formats.

    With `keep`, matrices that the checkpoint stores quantised keep their codes instead.
    """

    def __init__(self, checkpoint: Checkpoint, grid: Grid | None = None, *, keep: bool = False) -> None:
        self.checkpoint = checkpoint
        self.name = checkpoint.name
        self.config = checkpoint.config
        self.generation_config = checkpoint.generation_config
        self.has_tokenizer = checkpoint.has_tokenizer
        self.source_gguf = checkpoint.path if isinstance(checkpoint, GgufCheckpoint) else None
        self._grid = grid
        self.kept = stored_grids(checkpoint) if keep else {}

    def tensor_names(self) -> frozenset[str]:
        names = self.checkpoint.tensor_names()
        return names - {_HEAD} if self.config.tie_word_embeddings else names

    def shape(self, name: str) -> tuple[int, ...]:
        return self.checkpoint.shape(name)

    def tensor(self, name: str) -> torch.Tensor:
        value = self.checkpoint.tensor(name)
        if not value.isfinite().all():
            raise CheckpointError(
                f"{self.checkpoint.path}: {name} holds NaN or infinite values, expected finite weights; the checkpoint is damaged"
            )
        return value

    def write_tokenizer(self, out: Path) -> None:
        self.checkpoint.write_tokenizer(out)

    def grid(self, name: str) -> Grid | None:
        if name in self.kept:
            return self.kept[name]
        return self._grid if len(self.shape(name)) == 2 and name not in (_EMBEDDING, _HEAD) else None

    def quantized(self, name: str) -> QuantizedMatrix:
        grid = self.grid(name)
        assert grid is not None, f"{name} has no grid"
        if name in self.kept:
            stored = self.checkpoint.stored_matrix(name)
            assert isinstance(stored, QuantizedMatrix), f"{name} is not stored on {grid}"
            return stored
        return round_to_nearest(self.tensor(name), grid)


def stored_grids(checkpoint: Checkpoint) -> dict[str, Grid]:
    """The matrices that a checkpoint stores on a grid, and which."""
    if checkpoint.quantization is None:
        return {}
    grids = {kind: Grid.parse(kind.kept_as) for kind in checkpoint.quantization.tensors if kind.kept_as is not None}
    return {name: grid for kind, grid in grids.items() if grid is not None for name in checkpoint.quantization.tensors[kind]}


def run(options: ExportOptions, progress: Progress | None = None) -> ExportReport:
    """Open the model, quantise it as asked, export it. Raises subclasses of `LlmcError`; on any error nothing is left behind."""
    checkpoint = open_checkpoint(options.model)
    if options.quantize.calibrates:
        return _run_calibrated(checkpoint, options, progress or Silent())
    model = CheckpointModel(checkpoint, options.grid, keep=options.type is None and options.quantization is None)
    stem = Path(checkpoint.name).name
    if options.format == "gguf":
        label = options.quantization or options.type or ("kept" if model.kept else "Q4_K")
        report = write_gguf(options.output or Path(f"{stem}-{label}.gguf"), model, options.type or "Q4_K", options.head_type)
    else:
        label = options.quantization or ("kept" if model.kept else "int4-g128")
        if options.quantization is None and not model.kept:
            model = CheckpointModel(checkpoint, Grid.parse(label))
        output = options.output or Path(f"{stem}-{label}")
        report = write_compressed_tensors(output, model, activations=options.activations)
    if model.kept and checkpoint.quantization is not None:
        remarks = [str(kind) for kind in checkpoint.quantization.tensors if kind.kept_as and kind.remark]
        report.notes.extend(f"the model's {remark}" for remark in remarks)
    return report


def _run_calibrated(checkpoint: Checkpoint, options: ExportOptions, progress: Progress) -> ExportReport:
    from .export_calibrated import quantize_for_export

    grid, is_gguf = options.calibrated_grid, options.format == "gguf"
    method = options.quantize.method or ("rtn" if options.activations == "fp8" else "gptq")
    label = f"{options.quantization or grid}-{method}"
    output = options.output or Path(f"{Path(checkpoint.name).name}-{label}{'.gguf' if is_gguf else ''}")
    check_new(output)
    head = is_gguf and options.head_type in (None, "Q8_0")
    model, report, quantizer = quantize_for_export(
        checkpoint, grid, options.activations, options.quantize, output, progress, head=head
    )
    if is_gguf:
        written = write_gguf(output, model, options.type or "Q8_0", options.head_type or "Q8_0")
    else:
        written = write_compressed_tensors(output, model, activations=options.activations)
    quantizer.work.remove()
    return replace(written, quantization=report)


def write_gguf(output: Path, model: ExportModel, type_name: str = "Q4_K", head_type: str | None = None) -> ExportReport:
    """`export_gguf`, checked with llmc's own reader: config, tokenizer and tensors must come back as they went in."""

    def reopen(path: Path) -> Checkpoint:
        found = _reopen(GgufCheckpoint, path, model, output)
        if model.source_gguf is None:
            _check_tokenizer(found, model, output)
        return found

    return export_gguf(output, model, type_name=type_name, head_type=head_type, reopen=reopen)


def write_compressed_tensors(output: Path, model: ExportModel, *, activations: Activations = "16-bit") -> ExportReport:
    """`export_compressed_tensors`, checked with llmc's own reader: config and tensors must come back as they went in."""
    return export_compressed_tensors(
        output, model, activations=activations, reopen=lambda path: _reopen(HuggingFaceCheckpoint, path, model, output)
    )


def _reopen(reader: Callable[[Path], Checkpoint], path: Path, model: ExportModel, output: Path) -> Checkpoint:
    try:
        found = reader(path)
    except LlmcError as error:
        reason = str(error).replace(str(path), output.name)
        raise VerificationError(f"{output}: llmc does not read back what it would write; nothing was kept: {reason}") from error
    _check_config(found.config, model.config, output)
    return found


def _check_config(found: PretrainedConfig, meant: PretrainedConfig, output: Path) -> None:
    for name in _SAME_FIELDS:
        values = getattr(found, name, None), getattr(meant, name, None)
        if None not in values and not _same(*values):
            raise VerificationError(
                f"{output}: the file says {name}={values[0]!r}, the model has {values[1]!r}; nothing was kept"
            )


def _same(a: object, b: object) -> bool:
    """Equal, with floats to the precision of float32."""
    if isinstance(a, dict) and isinstance(b, dict):
        return all(_same(a[key], b[key]) for key in a.keys() & b.keys())
    if isinstance(a, int | float) and isinstance(b, int | float):
        return math.isclose(a, b, rel_tol=1e-6)
    return a == b


def _check_tokenizer(found: Checkpoint, model: ExportModel, output: Path) -> None:
    """Both tokenizers must cut the same samples of text into the same ids."""
    from tokenizers import Tokenizer

    ids = []
    for source in (found, model):
        with TemporaryDirectory() as folder:
            source.write_tokenizer(Path(folder))
            tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
            ids.append([tokenizer.encode(text).ids for text in _SAMPLES])
    for text, a, b in zip(_SAMPLES, *ids, strict=True):
        if a != b:
            raise VerificationError(
                f"{output}: the file's vocabulary cuts {text!r} into {a[:12]}, the model's tokenizer into {b[:12]}; nothing was kept; "
                "export as compressed-tensors, which copies the tokenizer"
            )
