"""What an exporter needs from a quantised model, and what every export answers with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ...errors import UsageError
from ...formats.grid import Grid, QuantizedMatrix

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

    from ...quantization.report import QuantizationReport

EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"


class ExportModel(ABC):
    """A causal LM to be written: Hugging Face names, shapes and values, one tensor at a time.

    q, k and v (gate and up) are separate matrices. Nothing is cached: an exporter holds one tensor, or one shard of them, at a time.
    """

    name: str
    config: PretrainedConfig
    generation_config: Mapping[str, object]
    has_tokenizer: bool
    source_gguf: Path | None = None
    """The GGUF file that the model was read from, whose metadata an exported GGUF takes over."""

    @abstractmethod
    def tensor_names(self) -> frozenset[str]:
        """Parameters such as `model.layers.0.self_attn.q_proj.weight`; a tied `lm_head.weight` is left out."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""

    @abstractmethod
    def tensor(self, name: str) -> torch.Tensor:
        """The unquantised values: float32, bfloat16 or float16."""

    @abstractmethod
    def write_tokenizer(self, out: Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and, if there is one, chat_template.jinja into `out`."""

    def grid(self, name: str) -> Grid | None:
        """The grid that a matrix has been quantised to; None leaves its format to the exporter."""
        return None

    def quantized(self, name: str) -> QuantizedMatrix:
        """The matrix on `grid(name)`, which is not None."""
        raise AssertionError(f"{name} has no grid")

    def input_step(self, name: str) -> float | None:
        """The one scale of a matrix's inputs where they are rounded to 8 bits with that of calibration; None: each token has its own."""
        return None

    def importance(self, name: str) -> torch.Tensor | None:
        """How much the error of each input column matters, `[K]`, for matrices that the exporter quantises itself."""
        return None


class StoredModel(Protocol):
    """A written model as it is read back: the checkpoint interface of the compiler fits."""

    def tensor_names(self) -> frozenset[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def dtype(self, name: str) -> str: ...
    def tensor(self, name: str) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """What was written: tensors and bytes for each stored type, remarks for the user, and what reading it back has shown.

    `exact` counts the quantised matrices whose codes and scales lie in the file as they were; `errors` has, for each type that was
    rounded to on the way, the largest relative error `|written - meant| / |meant|` of a tensor.
    """

    output: Path
    num_bytes: int
    tensors: dict[str, int]
    bytes_by_type: dict[str, int]
    notes: list[str] = field(default_factory=list)
    exact: int = 0
    errors: dict[str, float] = field(default_factory=dict)
    quantization: QuantizationReport | None = None
    """What a calibrated quantisation did before the export."""


def check_new(out: Path) -> None:
    """Raises `UsageError` where an export would overwrite something."""
    if out.exists():
        raise UsageError(f"export: {out} exists; remove it or choose another name")
