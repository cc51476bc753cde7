"""Reads a GGUF file as if it were a Hugging Face checkpoint."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...errors import CheckpointError
from .architectures import build_config, check_tensors
from .base import Checkpoint, generation_defaults, read_json_object
from .gguf_config import architecture_of, gguf_config
from .gguf_reader import GgufReader, GgufTensor
from .gguf_tensors import hf_names, read_tensor, to_hf_layout
from .gguf_tokenizer import write_gguf_tokenizer
from .gguf_vocabulary import end_of_turn_ids
from .quantized import StoredMatrix, StoredQuantization, summarize
from .quantized.gguf import GgufWeight, is_quantized

if TYPE_CHECKING:
    import torch


class GgufCheckpoint(Checkpoint):
    """A single-file GGUF of one of `GGUF_ARCHITECTURES`."""

    def __init__(self, path: Path, *, config_override: Path | None = None) -> None:
        self.path = path
        self._reader = GgufReader(path)
        self._architecture = architecture_of(self._reader)
        name = self._reader.metadata.get("general.name")
        self.name = name if isinstance(name, str) and name else path.stem
        if config_override is None:
            self.config = gguf_config(self._reader)
        else:
            self.config = build_config(read_json_object(config_override), config_override)
        self._stored: dict[str, GgufTensor] = {
            hf: self._reader.tensors[stored] for hf, stored in hf_names(self._architecture, self._reader.tensors).items()
        }
        self._names = check_tensors(
            str(path),
            self.config,
            {name: tensor.shape for name, tensor in self._stored.items()},
            allow_extra_layers=config_override is not None,
        )

        tokens = self._reader.metadata.get("tokenizer.ggml.tokens")
        if isinstance(tokens, list) and len(tokens) > self.config.vocab_size:
            raise CheckpointError(
                f"{path}: {len(tokens)} tokens but {self.config.vocab_size} rows of token_embd.weight; "
                "convert the model to GGUF again"
            )

    @cached_property
    def generation_config(self) -> dict[str, object]:
        return generation_defaults(self.config, *end_of_turn_ids(self._reader))

    @property
    def has_tokenizer(self) -> bool:
        return "tokenizer.ggml.tokens" in self._reader.metadata

    def tensor_names(self) -> frozenset[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._find(name).shape

    def dtype(self, name: str) -> str:
        return self._find(name).type_name

    def tensor(self, name: str) -> torch.Tensor:
        return self._to_hf_layout(name, read_tensor(self._reader, self._find(name)))

    def stored_matrix(self, name: str) -> StoredMatrix | None:
        weight = self._weight(name)
        return None if weight is None else weight.matrix()

    @cached_property
    def quantization(self) -> StoredQuantization | None:
        weights = {name: weight for name in self._names if (weight := self._weight(name)) is not None}
        matrices = sum(len(self.shape(name)) == 2 for name in self._names)
        return summarize("gguf", weights, matrices - len(weights), ()) if weights else None

    def write_tokenizer(self, out: Path) -> None:
        write_gguf_tokenizer(self._reader, out)

    def _weight(self, name: str) -> GgufWeight | None:
        """The matrix if it is stored in blocks."""
        tensor = self._find(name)
        if len(tensor.shape) != 2 or not is_quantized(tensor.type_name):
            return None
        return GgufWeight(
            tensor.type_name,
            (tensor.shape[0], tensor.shape[1]),
            f"{self.path}: tensor {tensor.name}",
            blocks=lambda: self._reader.blocks(tensor),
            reorder=lambda rows: self._to_hf_layout(name, _torch(rows)).numpy(),
            values=lambda: self.tensor(name).numpy(),
        )

    def _to_hf_layout(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        heads, kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        return to_hf_layout(name, tensor, architecture=self._architecture, heads=heads, kv_heads=kv_heads)

    def _find(self, name: str) -> GgufTensor:
        if name not in self._names:
            raise self.unknown_tensor(name)
        return self._stored[name]


def _torch(rows: np.ndarray) -> torch.Tensor:
    import torch

    return torch.from_numpy(np.ascontiguousarray(rows))
