"""Safetensors files of a folder, single or sharded and memory-mapped, with tensors under their causal LM names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from ...errors import CheckpointError
from .base import one_line, printable, read_json_object

if TYPE_CHECKING:
    import torch

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

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


class SafetensorsFolder:
    """The tensors of a folder by HF name. Headers are read when it is made, a tensor when it is asked for.

    Raises `CheckpointError` where files are absent or damaged, or where two tensors have one HF name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[str, Any] = {}  # shard -> safe_open handle, which has no type stubs
        self._stored: dict[str, tuple[str, str]] = {}  # HF name -> (shard, stored name)
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._types: dict[str, str] = {}
        for stored, shard in self._weight_map().items():
            self._add(stored, shard)

    def stored_names(self) -> Mapping[str, str]:
        """HF name -> name in the file."""
        return {name: stored for name, (_, stored) in self._stored.items()}

    def stored_shape(self, name: str) -> tuple[int, ...]:
        """Shape by HF name."""
        return self._shapes[name]

    def stored_type(self, name: str) -> str:
        """The header's type, such as "BF16"."""
        return self._types[name]

    def stored_tensor(self, name: str) -> torch.Tensor:
        """The tensor as it is stored."""
        shard, stored = self._stored[name]
        tensor: torch.Tensor = self._open(shard).get_tensor(stored)
        return tensor

    def where(self, name: str) -> str:
        """The file and the tensor, for errors."""
        shard, stored = self._stored[name]
        return f"{self.path / shard}: tensor {printable(stored)}"

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
        self._types[name] = view.get_dtype()


def _stays_inside(shard: str) -> bool:
    path = PurePosixPath(shard)
    plain = bool(shard) and "\\" not in shard and "\0" not in shard
    return plain and not path.is_absolute() and ".." not in path.parts
