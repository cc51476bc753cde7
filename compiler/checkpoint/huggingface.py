"""Reads a Hugging Face model folder: config.json, memory-mapped safetensors shards, tokenizer files."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from ...errors import CheckpointError, UnsupportedModelError
from .architectures import build_config, check_tensors
from .base import Checkpoint, generation_defaults, one_line, read_json_object
from .huggingface_tokenizer import end_of_turn_ids, has_tokenizer_files, write_tokenizer_files

if TYPE_CHECKING:
    import torch

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
STORED_TYPES = ("F32", "F16", "BF16")

# Prefixes of multimodal and backbone-only checkpoints, first match wins: stored prefix -> causal LM prefix.
_PREFIXES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("embed_tokens.", "model.embed_tokens."),
    ("layers.", "model.layers."),
    ("norm.", "model.norm."),
)
_OTHER_MODALITIES = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


class HuggingFaceCheckpoint(Checkpoint):
    """A folder in the layout of `save_pretrained`: single or sharded safetensors."""

    def __init__(self, path: Path, *, name: str | None = None, config_override: Path | None = None) -> None:
        self.path = path
        self.name = name or path.resolve().name
        config_file = config_override or path / "config.json"
        if not config_file.is_file():
            adapter = (path / "adapter_config.json").is_file()
            hint = "merge the adapter into its base model first" if adapter else "expected a save_pretrained folder"
            raise CheckpointError(f"{config_file}: no such file; {hint}")
        self.config = build_config(read_json_object(config_file), config_file)
        self._files: dict[str, Any] = {}  # shard -> safe_open handle, which has no type stubs
        self._stored: dict[str, tuple[str, str]] = {}  # HF name -> (shard, stored name)
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, str] = {}
        for stored, shard in self._weight_map().items():
            self._add(stored, shard)
        if self.config.tie_word_embeddings and EMBEDDING not in self._stored and LM_HEAD in self._stored:
            tables: tuple[dict[str, Any], ...] = (self._stored, self._shapes, self._dtypes)
            for table in tables:  # the one matrix was saved under the other of its two names
                table[EMBEDDING] = table.pop(LM_HEAD)
        self._names = check_tensors(str(path), self.config, self._shapes, allow_extra_layers=config_override is not None)
        for used in sorted(self._names):
            if self._dtypes[used] not in STORED_TYPES:
                raise UnsupportedModelError(
                    f"{self._where(used)}: stored type {self._dtypes[used]} is not supported; "
                    f"supported: {', '.join(STORED_TYPES)}"
                )

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
        return self._dtypes[name]

    def tensor(self, name: str) -> torch.Tensor:
        self._known(name)
        shard, stored = self._stored[name]
        tensor: torch.Tensor = self._open(shard).get_tensor(stored)
        return tensor

    def write_tokenizer(self, out: Path) -> None:
        write_tokenizer_files(self.path, out)

    def _known(self, name: str) -> None:
        if name not in self._names:
            raise self.unknown_tensor(name)

    def _where(self, name: str) -> str:
        shard, stored = self._stored[name]
        return f"{self.path / shard}: tensor {stored}"

    def _weight_map(self) -> dict[str, str]:
        """Stored tensor name -> shard file name, checked against what the shards hold."""
        index = self.path / INDEX_FILE
        if not index.is_file():
            if not (self.path / SINGLE_FILE).is_file():
                raise CheckpointError(f"{self.path}: {self._no_safetensors()}")
            return dict.fromkeys(self._open(SINGLE_FILE).keys(), SINGLE_FILE)
        weight_map = read_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index}: expected an object 'weight_map' from tensor name to shard file")
        for stored, shard in weight_map.items():
            if not isinstance(shard, str) or not _stays_inside(shard):
                raise CheckpointError(
                    f"{index}: weight_map sends {stored!r} to {shard!r}; expected the name of a file in this folder"
                )
        shards = sorted(set(weight_map.values()))
        missing = [shard for shard in shards if not (self.path / shard).is_file()]
        if missing:
            raise CheckpointError(
                f"{self.path}: {len(missing)} of {len(shards)} shards are missing, first {missing[0]!r}; "
                "download the checkpoint again"
            )
        held = {shard: set(self._open(shard).keys()) for shard in shards}
        for stored, shard in weight_map.items():
            if stored not in held[shard]:
                raise CheckpointError(f"{index}: lists {stored!r} in {shard!r}, which lacks it; download both again")
        return weight_map

    def _no_safetensors(self) -> str:
        others = [file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in sorted(self.path.glob(pattern))]
        if others:
            return (
                f"found {others[0]} but no {SINGLE_FILE}; pickled weights are not read: convert them with "
                "transformers' save_pretrained"
            )
        stray = sorted(file.name for file in self.path.glob("*.safetensors"))
        if stray:
            return f"found {stray[0]} but neither {SINGLE_FILE} nor {INDEX_FILE}; rename the file or add its index"
        return f"no {SINGLE_FILE} or {INDEX_FILE}; expected a folder with safetensors weights"

    def _open(self, shard: str) -> Any:
        from safetensors import SafetensorError, safe_open

        if shard not in self._files:
            file = self.path / shard
            try:
                self._files[shard] = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{file}: not a whole safetensors file ({one_line(error)}); download it again") from error
        return self._files[shard]

    def _add(self, stored: str, shard: str) -> None:
        if stored.startswith(_OTHER_MODALITIES):
            return
        name = stored
        for prefix, replacement in _PREFIXES:
            if stored.startswith(prefix):
                name = replacement + stored.removeprefix(prefix)
                break
        if name in self._stored:
            raise CheckpointError(f"{self.path}: both {self._stored[name][1]!r} and {stored!r} hold {name!r}; keep one")
        view = self._open(shard).get_slice(stored)
        self._stored[name] = (shard, stored)
        self._shapes[name] = tuple(view.get_shape())
        self._dtypes[name] = view.get_dtype()


def _stays_inside(shard: str) -> bool:
    path = PurePosixPath(shard)
    plain = bool(shard) and "\\" not in shard and "\0" not in shard
    return plain and not path.is_absolute() and ".." not in path.parts
