"""A checkpoint with a config and no files: weights are random, and the same for the same name on every machine."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...errors import CheckpointError
from .architectures import ARCHITECTURES, build_config, expected_shapes
from .base import Checkpoint, generation_defaults, read_json_object

if TYPE_CHECKING:
    import torch

_STORED_TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


class ConfigOnlyCheckpoint(Checkpoint):
    """Weights ~ normal(0, initializer_range) in the config's dtype (float32 if it names none), made when asked for.

    Norm weights lie close to neutral (1, or 0 where the architecture multiplies by 1+w). There is no tokenizer:
    prompts for such a model are token ids.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.resolve().parent.name if path.name == "config.json" else path.stem
        self.config = build_config(read_json_object(path), path)
        self._shapes = expected_shapes(self.config)
        dtype = str(getattr(self.config, "dtype", None) or "float32").removeprefix("torch.")
        if dtype not in _STORED_TYPES:
            raise CheckpointError(f"{path}: dtype is {dtype!r}, expected one of {', '.join(_STORED_TYPES)}")
        self._dtype = dtype
        self._scale = float(getattr(self.config, "initializer_range", 0.02))

    @property
    def generation_config(self) -> dict[str, object]:
        return generation_defaults(self.config)

    @property
    def has_tokenizer(self) -> bool:
        return False

    def tensor_names(self) -> frozenset[str]:
        return frozenset(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._shapes:
            raise self.unknown_tensor(name)
        return self._shapes[name]

    def dtype(self, name: str) -> str:
        self.shape(name)
        return _STORED_TYPES[self._dtype]

    def tensor(self, name: str) -> torch.Tensor:
        import torch

        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
        values = np.random.default_rng(seed).standard_normal(self.shape(name), dtype=np.float32)
        values *= self._scale
        if name.endswith("norm.weight") and not ARCHITECTURES[self.config.model_type].unit_offset_norm:
            values += 1.0
        return torch.from_numpy(values).to(getattr(torch, self._dtype))

    def write_tokenizer(self, out: Path) -> None:
        raise CheckpointError(f"{self.path}: a config alone has no tokenizer; compile a checkpoint to get one")
