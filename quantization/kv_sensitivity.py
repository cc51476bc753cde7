"""Measures what storing one layer's keys and values in few bits does to the model's output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from torch import fx

from ..passes.dialect import llmc
from ..passes.graph import is_call, shape
from ..passes.quantize_kv import KvOptions
from ..runtime.program import kv_head_bytes
from .allocate import Choice
from .layerwise import Forward, ReadWeight, Step
from .probe import Probe


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayer:
    """One layer's cache: `kl` by KV dtype, with that layer alone in it."""

    layer: int
    num_heads: int
    head_dim: int
    kl: dict[str, float]

    def choices(self, num_tokens: int) -> list[Choice]:
        """The dtypes as choices for a cache of so many tokens."""
        heads = 2 * self.num_heads * num_tokens
        return [
            Choice(format=format, num_bytes=heads * kv_head_bytes(format, self.head_dim), kl=kl)
            for format, kl in self.kl.items()
        ]


def attention_nodes(steps: Sequence[Step]) -> list[tuple[int, fx.Node]]:
    """The number of the step and the node of each layer's attention, in order."""
    return [(number, node) for number, step in enumerate(steps) for node in step.nodes if is_call(node, llmc.attention.default)]


def set_kv_format(node: fx.Node, format: str) -> None:
    """Let an attention of the calibration graph read its keys and values as a cache of `format` gives them back."""
    node.args = (*node.args[:7], format, KvOptions(formats=(format,)).rotates(format))


def measure_kv(
    module: fx.GraphModule,
    steps: Sequence[Step],
    probe: Probe,
    candidates: Sequence[str],
    read: ReadWeight,
    on_layer: Callable[[int], object] = lambda layer: None,
) -> list[KvLayer]:
    """Each layer with each of `candidates` in turn, all others exact. What bf16 adds is taken for 0."""
    forward = Forward(module, steps, probe.samples)
    found: list[KvLayer] = []
    nodes = dict(attention_nodes(steps))
    for number, step in enumerate(steps[:-1]):
        node = nodes.get(number)
        if node is not None:
            layer = len(found)
            kl: dict[str, float] = {}
            arguments = node.args
            for format in candidates:
                if format in ("bf16", "f32"):
                    kl[format] = 0.0
                    continue
                set_kv_format(node, format)
                kl[format] = probe.mean_kl(probe.finish(forward.fork(), number, read))
                node.args = arguments
            keys = shape(cast(fx.Node, node.args[1]))  # [1, Hkv, T, D]
            found.append(KvLayer(layer=layer, num_heads=keys[1], head_dim=keys[3], kl=kl))
            on_layer(layer)
        forward.run(step, read)
    return found
