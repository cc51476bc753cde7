"""The stored tensors of one module, such as `qweight`, `qzeros` and `scales`, with checks that name the tensor at fault."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ....errors import CheckpointError, UnsupportedModelError
from ....formats.floats import Array, Float32
from ..base import printable

if TYPE_CHECKING:
    import torch

FLOATS = ("F16", "BF16", "F32")


class TensorSource(Protocol):
    """Tensors as the file stores them, by name."""

    def stored_shape(self, name: str) -> tuple[int, ...]: ...

    def stored_type(self, name: str) -> str: ...

    def stored_tensor(self, name: str) -> torch.Tensor: ...

    def where(self, name: str) -> str:
        """The file and the tensor, for errors."""
        ...


class Module:
    """`parts` maps the last part of a tensor's name to the whole; `names` are the HF module name, such as
    `model.layers.0.self_attn.q_proj`, and the name in the file, which configs may use instead.
    """

    def __init__(self, names: tuple[str, str], parts: Mapping[str, str], source: TensorSource) -> None:
        self.names = names
        self.parts = parts
        self._source = source

    def __contains__(self, part: str) -> bool:
        return part in self.parts

    def require(self, *parts: str) -> None:
        """Raises `CheckpointError` where one of `parts` is not stored."""
        for part in parts:
            if part not in self.parts:
                there = next(iter(self.parts.values()))
                raise CheckpointError(
                    f"{self._source.where(there)}: {printable(self.names[1])}.{part} is missing beside it; expected {', '.join(parts)}: "
                    "download the checkpoint again"
                )

    def refuse(self, part: str, *, beside: str) -> None:
        """Raises `CheckpointError` where `part` is stored as well as `beside`, which means the same."""
        if part in self.parts:
            raise self.damaged(part, f"is stored beside {beside}, expected one of the two")

    def shape(self, part: str, dimensions: int) -> tuple[int, ...]:
        """The part's shape, with so many dimensions and none of them 0."""
        shape = self._source.stored_shape(self.parts[part])
        if len(shape) != dimensions or min(shape, default=1) < 1:
            raise self.damaged(part, f"has shape {list(shape)}, expected {dimensions} dimensions")
        return shape

    def any_shape(self, part: str) -> tuple[int, ...]:
        """The part's shape, whatever it is."""
        return self._source.stored_shape(self.parts[part])

    def expect(self, part: str, *shapes: tuple[int, ...], types: tuple[str, ...], given: str = "") -> None:
        """Raises `CheckpointError` unless the part has one of `shapes`, and `UnsupportedModelError` unless one of `types`.

        `given` says from what the shapes follow.
        """
        shape = self.any_shape(part)
        if shape not in shapes:
            expected = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
            raise self.damaged(part, f"has shape {list(shape)}, expected {expected}{given and f' for {given}'}")
        self.expect_type(part, *types)

    def expect_type(self, part: str, *types: str) -> None:
        """Raises `UnsupportedModelError` unless the part is stored as one of `types`."""
        if (found := self.type(part)) not in types:
            raise UnsupportedModelError(
                f"{self._source.where(self.parts[part])}: stored type {found} is not supported here; supported: {', '.join(types)}"
            )

    def type(self, part: str) -> str:
        """The part's stored type, such as "I32"."""
        return self._source.stored_type(self.parts[part])

    def tensor(self, part: str) -> torch.Tensor:
        """The part as it is stored."""
        return self._source.stored_tensor(self.parts[part])

    def integers(self, part: str) -> Array:
        """An integer part."""
        values: Array = self.tensor(part).numpy()
        return values

    def scales(self, part: str) -> Float32:
        """A part of floats, all finite, in float32."""
        values: Float32 = self.tensor(part).float().numpy()
        bad = int(np.size(values) - np.isfinite(values).sum())
        if bad:
            raise self.damaged(
                part, f"holds {bad} scales that are NaN or infinite, expected finite ones; quantise the model again"
            )
        return values

    def damaged(self, part: str, detail: str) -> CheckpointError:
        """The error for a part that cannot be what it should be."""
        return CheckpointError(f"{self._source.where(self.parts[part])}: {detail}")
