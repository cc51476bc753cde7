"""Chooses how each layer keeps its keys and values, and whether they are rotated first."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torch import fx

from ..errors import UsageError
from .base import Pass, PassResult
from .dialect import llmc
from .graph import calls, clean
from .kv_formats import KV_FORMATS, is_packed

_ROTATED = ("int8", "int4")  # by default: integers suffer from outliers, E4M3 does not


@dataclass(frozen=True, slots=True, kw_only=True)
class KvOptions:
    """`formats` has one of `KV_FORMATS` for each layer, or a single one for all.

    `rotation` says whether queries and keys of packed layers go through a Walsh-Hadamard transform; None rotates integers.
    """

    formats: tuple[str, ...] = ("f32",)
    rotation: bool | None = None

    def __post_init__(self) -> None:
        for format in self.formats:
            if format not in KV_FORMATS:
                raise UsageError(f"quantize-kv: KV dtype {format!r} is unknown; choose from {', '.join(KV_FORMATS)}")
        if self.rotation and not any(map(is_packed, self.formats)):
            raise UsageError(
                f"quantize-kv: rotation is asked for, but {', '.join(sorted(set(self.formats)))} keys are not packed; "
                "choose fp8, int8 or int4 for some layer or leave rotation out"
            )

    def rotates(self, format: str) -> bool:
        """Whether a layer of `format` is rotated."""
        return is_packed(format) and (format in _ROTATED if self.rotation is None else self.rotation)


class QuantizeKv(Pass):
    """Sets `kv_format` and `rotate_keys` of `llmc.rope_paged_attention`, layer by layer."""

    name = "quantize-kv"
    summary = "set the format of each layer's keys and values"
    requires = frozenset({"attention-fused"})
    ensures = frozenset({"kv-quantized"})
    lossy = True

    def __init__(self, options: KvOptions) -> None:
        self.options = options

    def run(self, module: fx.GraphModule) -> PassResult:
        attentions = list(calls(module, llmc.rope_paged_attention.default))
        formats = self.options.formats
        if len(formats) not in (1, len(attentions)):
            raise UsageError(
                f"quantize-kv: KV dtypes are given for {len(formats)} layers, but the model has {len(attentions)}; "
                "give one for each, or one for all"
            )
        matches: Counter[str] = Counter()
        changed = False
        for node, format in zip(attentions, formats * (len(attentions) // len(formats)), strict=True):
            rotate = self.options.rotates(format)
            changed |= node.args[-3:-1] != (format, rotate)
            node.args = (*node.args[:-3], format, rotate, node.args[-1])
            matches[format] += 1
            matches["rotated"] += rotate
        clean(module)
        return PassResult(changed=changed, matches=+matches)
