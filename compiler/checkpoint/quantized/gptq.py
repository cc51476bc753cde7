"""GPTQ checkpoints as AutoGPTQ and its successors write them, whichever way they store zeros (Frantar et al. 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ....errors import UnsupportedModelError
from ....formats.floats import Array
from .base import QuantizedWeight
from .format import Format
from .integer import GroupParameters, IntegerWeight
from .module import FLOATS, Module
from .packing import unpack
from .settings import Settings

_BITS = (2, 3, 4, 8)
_OFFSETS = {"gptq": 1, "gptq_v2": 0}  # what to add to a stored zero
_SAMPLED = 4  # matrices whose codes are read to tell the offset of asymmetric zeros


class GptqFormat(Format):
    """`qweight` int32 `[K*b/32, N]`, `qzeros` int32 `[G, N*b/32]`, `scales` `[G, N]` and perhaps `g_idx` int32 `[K]`.

    Version 1 stores zeros minus one, version 2 as they are, and configs are often wrong about it, so the values decide: symmetric
    zeros are the middle code in one reading alone, and weights have a mean near 0 in the right reading but one step off in the other.
    """

    method = "gptq"
    parts = frozenset({"qweight", "qzeros", "scales", "g_idx"})

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.bits = self._bits(settings, None)
        self.group = settings.group_size("group_size", 128)
        self.act_order = settings.flag("desc_act", False)
        key = "checkpoint_format" if settings.values.get("checkpoint_format") is not None else "format"
        self.declared = settings.text(key)
        if self.declared is not None:
            settings.choice(key, _OFFSETS)
        self.plain = settings.names("modules_to_not_convert")
        blocks = settings.values.get("modules_in_block_to_quantize")
        self.only = [name for block in blocks if isinstance(block, list) for name in block] if isinstance(blocks, list) else []
        self.overrides = settings.nested("dynamic") or Settings({}, f"{settings.where}.dynamic")
        self.weights: list[GptqWeight] = []

    @staticmethod
    def _bits(settings: Settings, default: int | None) -> int:
        bits = settings.integer("bits", default)
        if bits not in _BITS:
            raise UnsupportedModelError(f"{settings.where}.bits is {bits}; supported: {', '.join(map(str, _BITS))}")
        return bits

    def _override(self, names: tuple[str, ...]) -> Settings | None:
        """The entry of `dynamic` for a module; one without values where the entry excludes it."""
        for pattern in self.overrides.values:
            expression = pattern[2:] if pattern[:2] in ("+:", "-:") else pattern
            if any(self.overrides.matches(expression, name) for name in names):
                return Settings({}, "") if pattern.startswith("-:") else self.overrides.nested(pattern)
        return None

    def quantizes(self, names: tuple[str, ...]) -> bool:
        override = self._override(names)
        excluded = override is not None and not override.values
        named = not self.only or any(name.endswith(str(only)) for only in self.only for name in names)
        return named and not excluded and not self.settings.covers(self.plain, names)

    def weight(self, module: Module) -> QuantizedWeight | None:
        if not self.parts & module.parts.keys():
            return None
        module.require("qweight", "qzeros", "scales")
        module.refuse("weight", beside="qweight")
        override = self._override(module.names)
        bits = self.bits if override is None else self._bits(override, self.bits)
        group = self.group if override is None else override.group_size("group_size", self.group)
        rows, n = module.shape("qweight", 2)
        k = rows * 32 // bits
        groups = -(-k // (group or k))
        given = f"{bits} bits in groups of {group or k}, as the config says"
        module.expect("qweight", (-(-k * bits // 32), n), types=("I32",), given=given)
        module.expect("scales", (groups, n), types=FLOATS, given=given)
        module.expect("qzeros", (groups, -(-n * bits // 32)), types=("I32",), given=given)
        if "g_idx" in module:
            module.expect("g_idx", (k,), types=("I32", "I64"))
        self.weights.append(GptqWeight(module, bits, (n, k), group, self))
        return self.weights[-1]

    @cached_property
    def zero_offset(self) -> int:
        """What to add to stored zeros: 1 or 0."""
        found = {(int(zero), weight.bits) for weight in self.weights for zero in np.unique(weight.stored_zeros())}
        for offset in (1, 0):
            if all(zero + offset == 1 << (bits - 1) for zero, bits in found):
                return offset
        step = len(self.weights) / min(_SAMPLED, len(self.weights))
        sample = [self.weights[int(i * step)] for i in range(min(_SAMPLED, len(self.weights)))]
        means = {offset: abs(float(np.mean([weight.mean_step(offset) for weight in sample]))) for offset in (1, 0)}
        declared = _OFFSETS.get(self.declared or "")
        fine = all(weight.bits == 8 for weight in sample)  # a step is then so small that weights may well have a mean of one
        if declared is not None and (fine or means[declared] < means[1 - declared] + 0.5):
            return declared
        return 1 if means[1] <= means[0] else 0

    def notes(self, weights: Mapping[str, QuantizedWeight]) -> list[str]:
        if self.declared is None or _OFFSETS[self.declared] == self.zero_offset:
            return []
        stored = "minus one" if self.zero_offset else "as they are"
        return [f"the config says {self.declared!r}, but by their values zeros are stored {stored}: read so"]


class GptqWeight(IntegerWeight):
    """A weight in GPTQ's layout, version 1 or 2."""

    def __init__(self, module: Module, bits: int, shape: tuple[int, int], group: int | None, format: GptqFormat) -> None:
        super().__init__(module, bits, shape)
        self.group = group
        self.format = format

    def stored_zeros(self) -> npt.NDArray[np.uint8]:
        """`[G, N]`, as stored."""
        return unpack(self.module.integers("qzeros"), self.bits, self.shape[0])

    def zeros(self, offset: int) -> npt.NDArray[np.int16]:
        """`[N, G]`; the offset wraps, as version 1 stores 0 as the highest code."""
        stored = self.stored_zeros().astype(np.int16) + np.int16(offset)
        return np.ascontiguousarray((stored & np.int16((1 << self.bits) - 1)).T)

    def mean_step(self, offset: int) -> float:
        """The mean of code minus zero, in steps of the grid."""
        zeros = self.zeros(offset)
        columns = np.bincount(self._groups(zeros.shape[1]), minlength=zeros.shape[1])
        return float(self.codes().mean() - (zeros * columns).sum() / (self.shape[0] * self.shape[1]))

    def parameters(self) -> GroupParameters:
        scale = np.ascontiguousarray(self.module.scales("scales").T)
        groups = self._groups(scale.shape[1])
        in_order = bool((groups == self._in_order()).all())
        return GroupParameters(
            bits=self.bits,
            columns=self.shape[1],
            group=self.group,
            scale=scale,
            zero=self.zeros(self.format.zero_offset),
            column_group=None if in_order else groups,
        )

    def codes(self) -> npt.NDArray[np.uint8]:
        return unpack(np.ascontiguousarray(self.module.integers("qweight").T), self.bits, self.shape[1])

    def _in_order(self) -> Array:
        return np.arange(self.shape[1]) // (self.group or self.shape[1])

    def _groups(self, count: int) -> Array:
        """The group of each column, checked."""
        if "g_idx" not in self.module:
            return self._in_order()
        groups = self.module.integers("g_idx").astype(np.int64)
        if groups.min() < 0 or groups.max() >= count:
            raise self.module.damaged("g_idx", f"holds groups {groups.min()} to {groups.max()}, expected 0 to {count - 1}")
        placeholder = not self.format.act_order and not groups.any()  # some writers store zeros where there is no act order
        return self._in_order() if placeholder else groups
