"""Checkpoints of compressed-tensors, as llm-compressor writes them: packed or plain integers, or E4M3, by groups of modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ....errors import CheckpointError, UnsupportedModelError
from ....formats.floats import Array
from ..base import printable
from .base import QuantizedWeight
from .format import Format
from .fp8 import FP8_TYPES, Fp8Weight
from .integer import GroupParameters, IntegerWeight
from .module import FLOATS, Module
from .packing import unpack, unpack_words
from .settings import Settings

_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense")
_STRATEGIES = ("group", "channel", "tensor", "block")
_INTEGERS = ("I8", "I16", "I32", "I64")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightScheme:
    """The `weights` of one entry of `config_groups`."""

    bits: int
    integer: bool
    symmetric: bool
    strategy: str
    group: int | None
    block: tuple[int, int] | None

    @classmethod
    def parse(cls, settings: Settings) -> WeightScheme:
        """Read and check the entry."""
        size = settings.group_size("group_size", None)
        by_size = "group" if size else "channel" if settings.values.get("group_size") == -1 else "tensor"
        strategy = settings.choice("strategy", _STRATEGIES, by_size)
        integer = settings.choice("type", ("int", "float"), "int") == "int"
        bits = settings.integer("num_bits", 8)
        if not 1 < bits <= 8 or (not integer and bits != 8):
            supported = "2 to 8" if integer else "8 (E4M3)"
            raise UnsupportedModelError(f"{settings.where}.num_bits is {bits}; supported: {supported}")
        if strategy == "group" and size is None:
            raise settings.wrong("group_size", "the columns of a group, as the strategy is 'group'")
        block = settings.pair("block_structure")
        if strategy == "block" and (block is None or integer):
            raise UnsupportedModelError(
                f"{settings.where}: strategy 'block' needs type 'float' and block_structure [rows, columns]"
            )
        symmetric = settings.flag("symmetric", True)
        group = size if strategy == "group" else None
        return cls(bits=bits, integer=integer, symmetric=symmetric, strategy=strategy, group=group, block=block)

    def scale_blocks(self, n: int, k: int) -> dict[tuple[int, ...], tuple[int, int]]:
        """Shapes that `weight_scale` may have, and the rows and columns for which one scale then stands."""
        if self.strategy == "tensor":
            return dict.fromkeys([(1,), (), (1, 1)], (n, k))
        if self.strategy == "channel":
            return dict.fromkeys([(n, 1), (n,)], (1, k))
        rows, columns = self.block if self.block is not None and self.strategy == "block" else (1, self.group or k)
        return {(-(-n // rows), -(-k // columns)): (rows, columns)}


class CompressedTensorsFormat(Format):
    """`weight_packed` int32 `[N, K*b/32]` with `weight_shape`, or `weight` in int8 or E4M3; with them `weight_scale` and perhaps
    `weight_zero_point` and `weight_g_idx`.

    What is stored decides, not the names of formats. Codes are signed; packed ones, and packed zero points, have 2^(b-1) added.
    """

    method = "compressed-tensors"
    parts = frozenset({"weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"})

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        settings.choice("format", _FORMATS, "dense")
        sparsity, transforms = settings.nested("sparsity_config"), settings.nested("transform_config")
        if sparsity is not None and sparsity.text("format", "dense") != "dense":
            raise UnsupportedModelError(
                f"{settings.where}.sparsity_config: sparse weights are not supported; expected it unset"
            )
        if transforms is not None and transforms.values.get("config_groups"):
            raise UnsupportedModelError(f"{settings.where}.transform_config: transforms are not supported; expected it unset")
        self.plain = settings.names("ignore")
        self.schemes: list[tuple[tuple[str, ...], WeightScheme]] = []
        groups = settings.nested("config_groups")
        for name in groups.values if groups is not None else ():
            assert groups is not None
            group = groups.nested(name)
            if group is None:
                raise groups.wrong(name, "an object")
            group.choice("format", _FORMATS, "dense")
            weights = group.nested("weights")
            if weights is not None:
                self.schemes.append((group.names("targets"), WeightScheme.parse(weights)))

    def quantizes(self, names: tuple[str, ...]) -> bool:
        return self._scheme(names) is not None and not self.settings.covers(self.plain, names)

    def notes(self, weights: Mapping[str, QuantizedWeight]) -> list[str]:
        scheme = self.settings.values.get("kv_cache_scheme")
        return [] if scheme is None else ["the config's kv_cache_scheme is not used: the KV cache has the format chosen here"]

    def _scheme(self, names: tuple[str, ...]) -> WeightScheme | None:
        """The scheme that targets a module: by name, else by expression, else by class."""
        kind = "Embedding" if names[0].endswith("embed_tokens") else "Linear"
        found: dict[int, WeightScheme] = {}
        for targets, scheme in self.schemes:
            for target in targets:
                expression = target.startswith("re:") and any(self.settings.matches(target[3:], name) for name in names)
                rank = 0 if target in names else 1 if expression else 2 if target == kind else None
                if rank is not None:
                    found.setdefault(rank, scheme)
        return found[min(found)] if found else None

    def weight(self, module: Module) -> QuantizedWeight | None:
        stored = "weight" in module and module.type("weight") not in FLOATS
        if not stored and not self.parts & module.parts.keys():
            return None
        if stored:
            module.refuse("weight_packed", beside="weight")
        if not stored and "weight" in module:
            raise module.damaged(
                "weight",
                f"is stored as {module.type('weight')} beside its scales, expected quantised values; the model was saved without "
                "compression: save it again with save_compressed=True",
            )
        scheme = self._scheme(module.names)
        if scheme is None:
            raise CheckpointError(
                f"{self.settings.where}.config_groups: no target matches {printable(module.names[0])}, which is stored quantised"
            )
        if stored:
            module.require("weight", "weight_scale")
            n, k = module.shape("weight", 2)
        else:
            module.require("weight_packed", "weight_scale", "weight_shape")
            n, k = self._packed_shape(module, scheme)
        blocks = scheme.scale_blocks(n, k)
        module.expect("weight_scale", *blocks, types=FLOATS)
        if not scheme.integer:
            module.expect_type("weight" if stored else "weight_packed", *FP8_TYPES)
            return Fp8Weight(module, (n, k), "weight_scale", blocks[module.any_shape("weight_scale")])
        if stored:
            module.expect_type("weight", "I8")
        if not scheme.symmetric:
            module.require("weight_zero_point")
        if "weight_g_idx" in module:
            module.expect("weight_g_idx", (k,), types=("I32", "I64"))
        return CompressedWeight(module, (n, k), scheme)

    def _packed_shape(self, module: Module, scheme: WeightScheme) -> tuple[int, int]:
        module.expect("weight_shape", (2,), types=("I32", "I64"))
        n, k = (int(size) for size in module.integers("weight_shape"))
        if n < 1 or not 1 <= k < 1 << 40:
            raise module.damaged("weight_shape", f"holds {[n, k]}, expected two positive sizes")
        words = (-(-k * scheme.bits // 32), -(-k // (32 // scheme.bits)))
        if scheme.integer:
            module.expect("weight_packed", *((n, width) for width in words), types=("I32",))
        return n, k


class CompressedWeight(IntegerWeight):
    """An integer weight of compressed-tensors."""

    def __init__(self, module: Module, shape: tuple[int, int], scheme: WeightScheme) -> None:
        super().__init__(module, scheme.bits, shape)
        self.scheme = scheme
        self.middle = 1 << (scheme.bits - 1)

    def codes(self) -> npt.NDArray[np.uint8]:
        if "weight_packed" in self.module:
            return self._unpack(self.module.integers("weight_packed"), self.shape[1])
        signed = self.module.integers("weight")
        if self.bits == 8:
            unsigned: npt.NDArray[np.uint8] = signed.view(np.uint8) ^ np.uint8(128)
            return unsigned
        if signed.min() < -self.middle or signed.max() >= self.middle:
            raise self.module.damaged("weight", f"holds codes {signed.min()} to {signed.max()}, more than {self.bits} bits")
        shifted: npt.NDArray[np.int8] = signed + np.int8(self.middle)
        return shifted.view(np.uint8)

    def parameters(self) -> GroupParameters:
        n, k = self.shape
        scale = self.module.scales("weight_scale")
        scale = np.full((n, 1), scale.reshape(-1)[0]) if scale.size == 1 else scale.reshape(n, -1)
        return GroupParameters(
            bits=self.bits,
            columns=k,
            group=self.scheme.group,
            scale=scale,
            zero=self._zeros(scale.shape[1]),
            column_group=self._column_group(scale.shape[1]),
        )

    def _zeros(self, groups: int) -> npt.NDArray[np.int16]:
        """`[N, G]`, unsigned."""
        n = self.shape[0]
        if "weight_zero_point" not in self.module:
            return np.full((n, groups), self.middle, np.int16)
        part, module = "weight_zero_point", self.module
        if "weight_packed" in module and module.type(part) == "I32":
            rows = (-(-n * self.bits // 32), -(-n // (32 // self.bits)))
            module.expect(part, *((count, groups) for count in rows), types=("I32",))
            packed: npt.NDArray[np.int16] = self._unpack(np.ascontiguousarray(module.integers(part).T), n).T.astype(np.int16)
            return packed
        module.expect(part, (n, groups), *(((n,), (), (1,), (1, 1)) if groups == 1 else ()), types=_INTEGERS)
        zero: Array = module.integers(part).astype(np.int64)
        if self.scheme.symmetric and zero.any():
            raise module.damaged(part, "holds zero points other than 0, but the config says symmetric: true")
        if zero.min() < -self.middle or zero.max() >= self.middle:
            raise module.damaged(part, f"holds zero points {zero.min()} to {zero.max()}, more than {self.bits} bits")
        unsigned: npt.NDArray[np.int16] = (zero.reshape(-1, groups) + self.middle).astype(np.int16)
        return np.ascontiguousarray(np.broadcast_to(unsigned, (n, groups)))

    def _column_group(self, groups: int) -> Array | None:
        """The group of each column where that is not its place's; -1 throughout means none was set."""
        if "weight_g_idx" not in self.module or self.scheme.group is None:
            return None
        index = self.module.integers("weight_g_idx").astype(np.int64)
        if (index == -1).all() or (index == np.arange(len(index)) // self.scheme.group).all():
            return None
        if index.min() < 0 or index.max() >= groups:
            raise self.module.damaged(
                "weight_g_idx", f"holds groups {index.min()} to {index.max()}, expected 0 to {groups - 1}"
            )
        return index

    def _unpack(self, words: Array, count: int) -> npt.NDArray[np.uint8]:
        dense = words.shape[1] == -(-count * self.bits // 32)  # older writers let no code cross a word
        return unpack(words, self.bits, count) if dense else unpack_words(words, self.bits, count)
