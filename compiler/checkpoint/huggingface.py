"""Reads a Hugging Face model folder: config.json, memory-mapped safetensors shards, tokenizer files."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import CheckpointError, UnsupportedModelError
from .architectures import build_config, check_tensors, expected_shapes
from .base import Checkpoint, generation_defaults, read_json_object
from .huggingface_tokenizer import end_of_turn_ids, has_tokenizer_files, write_tokenizer_files
from .quantized import QuantizedFolder, QuantizedWeight, StoredMatrix, StoredQuantization, take_format
from .safetensors_folder import SafetensorsFolder

if TYPE_CHECKING:
    import torch

EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
STORED_TYPES = ("F32", "F16", "BF16")


class HuggingFaceCheckpoint(Checkpoint):
    """A folder in the layout of `save_pretrained`: single or sharded safetensors, plain or quantised by one of `quantized.FORMATS`."""

    def __init__(self, path: Path, *, name: str | None = None, config_override: Path | None = None) -> None:
        self.path = path
        self.name = name or path.resolve().name
        config_file = config_override or path / "config.json"
        if not config_file.is_file():
            adapter = (path / "adapter_config.json").is_file()
            hint = "merge the adapter into its base model first" if adapter else "expected a save_pretrained folder"
            raise CheckpointError(f"{config_file}: no such file; {hint}")
        values = read_json_object(config_file)
        format = take_format(values, config_file)
        own = path / "config.json"
        if (
            format is None and config_override is not None and own.is_file()
        ):  # how weights are stored is not the override's to say
            format = take_format(read_json_object(own), own)
        self.config = build_config(values, config_file)
        self._folder = SafetensorsFolder(path)
        expected = expected_shapes(self.config)
        self._quantized = None if format is None else QuantizedFolder(format, self._folder, expected)
        self._weights: dict[str, QuantizedWeight] = {} if self._quantized is None else self._quantized.weights
        consumed = frozenset() if self._quantized is None else self._quantized.consumed
        self._plain = {name: name for name in self._folder.stored_names() if name not in consumed}  # HF name -> the folder's
        if self.config.tie_word_embeddings and not {EMBEDDING} & (self._plain.keys() | self._weights.keys()):
            if LM_HEAD in self._plain:  # the one matrix was saved under the other of its two names
                self._plain[EMBEDDING] = self._plain.pop(LM_HEAD)
            elif LM_HEAD in self._weights:
                self._weights[EMBEDDING] = self._weights.pop(LM_HEAD)
        self._shapes = {name: self._folder.stored_shape(stored) for name, stored in self._plain.items()}
        self._shapes |= {name: weight.shape for name, weight in self._weights.items()}
        self._names = check_tensors(
            str(path), self.config, self._shapes, expected=expected, allow_extra_layers=config_override is not None
        )
        for used in sorted(self._names - self._weights.keys()):
            if (stored := self.dtype(used)) not in STORED_TYPES:
                raise UnsupportedModelError(
                    f"{self._folder.where(self._plain[used])}: stored type {stored} is not supported; "
                    f"supported: {', '.join(STORED_TYPES)}, and the quantised formats that config.json's quantization_config describes"
                )

    @cached_property
    def quantization(self) -> StoredQuantization | None:
        if self._quantized is None:
            return None
        return self._quantized.summary({name: self._shapes[name] for name in self._names})

    @cached_property
    def generation_config(self) -> dict[str, object]:
        file = self.path / "generation_config.json"
        values = read_json_object(file) if file.is_file() else {}
        defaults = generation_defaults(self.config, values.get("eos_token_id"), *end_of_turn_ids(self.path))
        return {**defaults, **values, "eos_token_id": defaults["eos_token_id"]}

    @property
    def has_tokenizer(self) -> bool:
        return has_tokenizer_files(self.path)

    def tensor_names(self) -> frozenset[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        self._known(name)
        return self._shapes[name]

    def dtype(self, name: str) -> str:
        self._known(name)
        return self._weights[name].stored_type if name in self._weights else self._folder.stored_type(self._plain[name])

    def tensor(self, name: str) -> torch.Tensor:
        import torch

        self._known(name)
        if name in self._weights:
            return torch.from_numpy(self._weights[name].dequantize())
        return self._folder.stored_tensor(self._plain[name])

    def stored_matrix(self, name: str) -> StoredMatrix | None:
        self._known(name)
        return self._weights[name].matrix() if name in self._weights else None

    def write_tokenizer(self, out: Path) -> None:
        write_tokenizer_files(self.path, out)

    def _known(self, name: str) -> None:
        if name not in self._names:
            raise self.unknown_tensor(name)
