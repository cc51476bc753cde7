"""Reads graph weights from the checkpoint: stacked, in float32, and decoded as their stored format would decode them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..passes.graph import Weight, WeightTable
from ..quantization.number_formats import Array
from .checkpoint import Checkpoint

_TIED = {"lm_head.weight": "model.embed_tokens.weight", "model.embed_tokens.weight": "lm_head.weight"}


class WeightStore:
    """Weights of one graph. Nothing is cached: a caller holds one weight at a time."""

    def __init__(self, checkpoint: Checkpoint, decode_matrix: Callable[[Array, str], Array] | None = None) -> None:
        """`decode_matrix(value, format)` gives a matrix as a back end's stored format gives it back; `decoded` needs it."""
        self.checkpoint = checkpoint
        self.decode_matrix = decode_matrix

    def check(self, table: WeightTable) -> None:
        """Raises `CheckpointError` where the checkpoint lacks a source or its shapes do not add up to the graph's."""
        for name, weight in table.items():
            shapes = [self.checkpoint.shape(self._stored(source)) for source in weight.sources]
            rows = sum(shape[0] for shape in shapes)
            if (rows, *shapes[0][1:]) != weight.shape:
                raise CheckpointError(
                    f"{self.checkpoint.path}: {' + '.join(weight.sources)} have shapes {shapes}, expected {weight.shape} for {name}; "
                    "the weights belong to another config"
                )

    def read(self, weight: Weight) -> Tensor:
        """The stacked weight in float32."""
        parts = [self.checkpoint.tensor(self._stored(source)) for source in weight.sources]
        for source, part in zip(weight.sources, parts, strict=True):
            if not torch.isfinite(part).all():
                raise CheckpointError(
                    f"{self.checkpoint.path}: {source} holds NaN or infinite values, expected finite weights; the checkpoint is damaged"
                )
        return (parts[0] if len(parts) == 1 else torch.cat([p.to(torch.float32) for p in parts])).to(torch.float32)

    def decoded(self, weight: Weight) -> Tensor:
        """The weight as it comes back from its stored format, in float32."""
        value = self.read(weight)
        if weight.format == "f32" or value.dim() != 2:
            return value
        assert self.decode_matrix is not None
        return torch.from_numpy(self.decode_matrix(value.numpy(), weight.format))

    def _stored(self, source: str) -> str:
        if source not in self.checkpoint.tensor_names() and source in _TIED:
            return _TIED[source]
        return source
