"""Opens a model wherever it is: a Hugging Face folder, a GGUF file, a hub id, or only a config."""

from __future__ import annotations

import re
from pathlib import Path

from ...errors import CheckpointError
from .architectures import ARCHITECTURES, check_supported
from .base import Checkpoint, one_line
from .random_weights import ConfigOnlyCheckpoint

__all__ = ["ARCHITECTURES", "Checkpoint", "ConfigOnlyCheckpoint", "check_supported", "open_checkpoint", "open_config"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt")


def open_checkpoint(model: str, *, config_override: Path | None = None) -> Checkpoint:
    """Open `model`: a folder with config.json and safetensors, a GGUF file, or a hub id.

    `config_override` is a config.json to use in place of the model's own; it may have fewer layers than are stored.
    Headers are read and checked against the architecture, weights are not. Raises `CheckpointError` for absent,
    damaged or contradictory files and `UnsupportedModelError` for what llmc does not compile.
    """
    from .gguf_file import GgufCheckpoint
    from .huggingface import HuggingFaceCheckpoint

    path = Path(model).expanduser()
    if path.is_dir():
        return HuggingFaceCheckpoint(path, config_override=config_override)
    if path.is_file():
        if path.suffix == ".safetensors" or path.name == "config.json":
            raise CheckpointError(f"{path}: name the folder that holds this file instead: {path.parent}")
        return GgufCheckpoint(path, config_override=config_override)
    if path.suffix == ".gguf" or not _HUB_ID.fullmatch(model):
        raise CheckpointError(f"{model}: no such file or folder; expected a model folder, a GGUF file or a hub id")
    return HuggingFaceCheckpoint(_download(model), name=model, config_override=config_override)


def open_config(path: Path) -> Checkpoint:
    """Open a config.json alone; its weights are random and deterministic, and it has no tokenizer."""
    return ConfigOnlyCheckpoint(Path(path))


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(_HUB_FILES)))
    except Exception as error:  # connection, authentication and lookup errors have no common base
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise CheckpointError(
            f"{hub_id}: no such folder here, and not available from the hub ({reason}); download the model and pass its folder"
        ) from error
