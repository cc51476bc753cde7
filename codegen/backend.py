"""What the driver asks of a code generator: the passes, the lowering and the build of one target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from torch import fx

from ..formats.floats import Array
from ..formats.grid import MatrixValue
from ..passes.base import Pass
from ..passes.quantize import QuantizeOptions
from ..runtime.program import KvCacheSpec, WeightSpec
from ..targets import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramOptions:
    """How to build a target's program; None stands for the back end's own choice.

    `formats` gives matrices, by graph name, a format other than `quantization`'s; `prefill_quantization` stores the layers' matrices
    once more for prefill. `kv_layers` has a KV dtype for each layer and goes before `kv_dtype`, which is one for all. `kv_rotation` says
    whether the keys of packed dtypes are rotated by a Walsh-Hadamard transform before they are rounded.
    """

    quantization: str | None = None
    formats: Mapping[str, str] = field(default_factory=dict)
    prefill_quantization: str | None = None
    kv_dtype: str | None = None
    kv_layers: tuple[str, ...] | None = None
    kv_rotation: bool | None = None
    max_tokens: int | None = None
    cpu_levels: tuple[str, ...] | None = None
    cache: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What a program needs to know of the model beside its graph."""

    name: str
    vocab_size: int
    context_length: int


class StoredWeight(Protocol):
    """A graph weight in one layout; hashable, and equal only where the stored bytes are."""

    @property
    def name(self) -> str:
        """The graph's name."""
        ...

    @property
    def kind(self) -> str:
        """The format as reports name it: `int8-g128`, `fp8`, `vectors`."""
        ...

    def specs(self) -> list[WeightSpec]:
        """Its tensors."""
        ...

    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        ...

    def tensors(self, value: MatrixValue) -> list[Array]:
        """The packed tensors of the weight, float32 or on the grid of its format, matching `specs()`."""
        ...


class LoweredProgram(Protocol):
    """A program before its kernels are built."""

    @property
    def weights(self) -> Sequence[StoredWeight]:
        """In the order in which the program takes them."""
        ...

    @property
    def arena_bytes(self) -> int:
        """Scratch memory."""
        ...

    @property
    def kv_cache(self) -> KvCacheSpec:
        """The KV pool's blocks."""
        ...

    def num_calls(self) -> Mapping[str, int]:
        """Kernel calls of each phase."""
        ...

    def floors(self) -> list[dict[str, object]]:
        """Bytes, operations and least time of each kernel call on the device; empty where the device's rates are unknown."""
        ...

    def build(self, folder: Path, on_kernel: Callable[[str], object]) -> dict[str, int]:
        """Write program.json, sources and binaries to `folder`; returns the bytes of each binary. Raises `ToolchainError`."""
        ...


class Backend(Protocol):
    """One target's code generator."""

    @property
    def target(self) -> Target:
        """What it generates code for."""
        ...

    @property
    def quantization(self) -> QuantizeOptions:
        """The stored format of every matrix."""
        ...

    @property
    def candidates(self) -> Sequence[str]:
        """Formats that a matrix may be given, among which an allocator chooses."""
        ...

    def format_for(self, stored: str) -> str | None:
        """The format that keeps a checkpoint's matrix as it is, from the name of its grid or `fp8`; None if there is none."""
        ...

    @property
    def kv_candidates(self) -> Sequence[str]:
        """KV dtypes that a layer may be given; one if layers cannot differ."""
        ...

    def check(self) -> dict[str, str]:
        """Find the tools that `build` needs: their names and versions. Raises `ToolchainError` or `MissingExtraError`."""
        ...

    def notes(self) -> list[str]:
        """What a user should know about the tools that were found."""
        ...

    def pipeline(self) -> tuple[Pass, ...]:
        """The passes from a traced graph to one that `lower` takes."""
        ...

    def decode_matrix(self, value: Array, format: str) -> Array:
        """A float32 matrix as it comes back after being stored in `format`."""
        ...

    def lower(self, module: fx.GraphModule, model: ModelShape) -> LoweredProgram:
        """Choose kernels and weights. Raises `UnsupportedModelError` and `TargetError`."""
        ...
