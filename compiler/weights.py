"""Reads graph weights: stacked from the checkpoint's tensors, rescaled, or as a quantiser or the checkpoint itself has quantised them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ..errors import CheckpointError
from ..formats.floats import Array, Fp8Matrix
from ..formats.grid import Grid, MatrixValue, QuantizedMatrix, stack
from ..passes.graph import Weight, WeightTable
from ..quantization.quantized_model import QuantizedModel
from ..quantization.rescale import Rescaling
from .checkpoint import Checkpoint

_TIED = {"lm_head.weight": "model.embed_tokens.weight", "model.embed_tokens.weight": "lm_head.weight"}


class WeightStore:
    """Weights of one graph. Nothing is cached: a caller holds one weight at a time."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        decode_matrix: Callable[[Array, str], Array] | None = None,
        quantized: QuantizedModel | None = None,
    ) -> None:
        """`decode_matrix(value, format)` gives a matrix as a back end's stored format gives it back; `decoded` needs it.

        `quantized` holds matrices that need no rounding any more, and the rescaling of those that do.
        """
        self.checkpoint = checkpoint
        self.decode_matrix = decode_matrix
        self.quantized = quantized or QuantizedModel()

    def check(self, table: WeightTable) -> None:
        """Raises `CheckpointError` where the checkpoint lacks a source or its shapes do not add up to the graph's."""
        for name, weight in table.items():
            shapes = [self.shape(source) for source in weight.sources]
            rows = sum(shape[0] for shape in shapes)
            if (rows, *shapes[0][1:]) != weight.shape:
                raise CheckpointError(
                    f"{self.checkpoint.path}: {' + '.join(weight.sources)} have shapes {shapes}, expected {weight.shape} for {name}; "
                    "the weights belong to another config"
                )

    def shape(self, source: str) -> tuple[int, ...]:
        """The shape of a graph weight's source."""
        return self.checkpoint.shape(self._stored(source))

    def tensor(self, source: str) -> Tensor:
        """A graph weight's source as the checkpoint stores it. Raises `CheckpointError` for values that are not finite."""
        value = self.checkpoint.tensor(self._stored(source))
        if not torch.isfinite(value).all():
            raise CheckpointError(
                f"{self.checkpoint.path}: {source} holds NaN or infinite values, expected finite weights; the checkpoint is damaged"
            )
        return value

    def read(self, weight: Weight, rescaling: Rescaling | None = None) -> Tensor:
        """The stacked weight in float32, rescaled as the quantised model needs it, or by `rescaling`."""
        factors = self.quantized.rescaling if rescaling is None else rescaling
        parts = [factors.apply(source, self.tensor(source)) for source in weight.sources]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def value(self, name: str, weight: Weight) -> MatrixValue:
        """What is packed for graph weight `name`: a matrix in its format if there is one, else float32."""
        grid = Grid.parse(weight.format)
        made = self.quantized.matrix(name) if grid is not None else None
        if made is not None:
            return made if made.grid == grid else self.read(weight).numpy()
        storable = weight.format if weight.format == "fp8" else grid and str(grid)
        if storable is not None and self.kept_format(weight) == storable:
            return self._kept(weight)
        return self.read(weight).numpy()

    def decoded(self, name: str, weight: Weight) -> Tensor:
        """The weight as it comes back from its stored format, in float32."""
        value = self.value(name, weight)
        if not isinstance(value, np.ndarray):
            return torch.from_numpy(value.dequantize())
        if weight.format == "f32" or value.ndim != 2:
            return torch.from_numpy(value)
        assert self.decode_matrix is not None
        return torch.from_numpy(self.decode_matrix(value, weight.format))

    def kept_format(self, weight: Weight) -> str | None:
        """The grid, or `fp8`, that the checkpoint stores all of a weight's sources in; None if they differ, have none or are rescaled."""
        if any(source in self.quantized.rescaling for source in weight.sources):
            return None
        found = {self._kept_formats.get(self._stored(source)) for source in weight.sources}
        return found.pop() if len(found) == 1 else None

    @cached_property
    def _kept_formats(self) -> dict[str, str | None]:
        stored = self.checkpoint.quantization
        return {} if stored is None else {name: kind.kept_as for kind, names in stored.tensors.items() for name in names}

    def _kept(self, weight: Weight) -> QuantizedMatrix | Fp8Matrix:
        """The codes of a weight that has a `kept_format`."""
        parts = [self.checkpoint.stored_matrix(self._stored(source)) for source in weight.sources]
        matrices = [part for part in parts if isinstance(part, QuantizedMatrix)]
        if len(matrices) == len(parts):
            return stack(matrices)
        numbers = [part for part in parts if isinstance(part, Fp8Matrix)]
        return Fp8Matrix(bits=np.concatenate([m.bits for m in numbers]), scale=np.concatenate([m.scale for m in numbers]))

    def _stored(self, source: str) -> str:
        if source not in self.checkpoint.tensor_names() and source in _TIED:
            return _TIED[source]
        return source
