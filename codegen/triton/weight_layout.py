"""How graph weights become the tensors a GPU program takes; equal ones are shared by the targets of a bundle."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...formats.floats import Array
from ...formats.grid import MatrixValue
from ...runtime.program import WeightSpec
from ...runtime.weights import tensor_bytes
from .formats import GpuFormat, pack_vector, vector_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuWeight:
    """One graph weight as a program reads it: a matrix has a `format`, a vector gets `offset` added (norms that multiply by 1 + w)."""

    name: str
    shape: tuple[int, ...]
    format: GpuFormat | None = None
    offset: float = 0.0

    @property
    def kind(self) -> str:
        """The format as reports name it."""
        return str(self.format) if self.format else "vectors"

    def specs(self) -> list[WeightSpec]:
        """The tensors in the order in which a program takes them."""
        return [vector_spec(self.name, self.shape[0])] if self.format is None else self.format.specs(self.name, self.shape)

    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor_bytes(spec.dtype, spec.shape) for spec in self.specs())

    def tensors(self, value: MatrixValue) -> list[Array]:
        """The packed tensors of a `value` of `shape`, matching `specs()`."""
        if self.format is not None:
            return self.format.pack(value)
        assert isinstance(value, np.ndarray), f"{self.name} is a vector"
        return [pack_vector(value + np.float32(self.offset))]
