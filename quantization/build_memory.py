"""What quantising a model layer by layer takes in memory, before it is begun."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from ..passes.graph import WeightTable
from .layerwise import Step
from .probe import MAX_LOGIT_BYTES

_PROGRAM: Final = 768 << 20  # torch, transformers, and the graph itself
_LOGIT_COPIES: Final = 3  # the reference, what is compared with it, and the work of comparing


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildMemory:
    """Bytes of each part; their sum is an upper bound of the resident size."""

    program: int
    layers: int
    """Two layers in float32: one as read and one as rounded."""
    embedding: int
    """The largest matrix outside of the layers in float32, twice where it is rounded like a layer."""
    moments: int
    """The second moment of the widest input and its Cholesky factor."""
    activations: int
    """What is kept of all samples between two steps, or of one where they are spilled."""
    logits: int

    @property
    def total(self) -> int:
        """The sum."""
        return self.program + self.layers + self.embedding + self.moments + self.activations + self.logits

    @classmethod
    def estimate(
        cls, table: WeightTable, steps: Sequence[Step], samples: Sequence[Tensor], *, whole_moments: bool, spilled: bool
    ) -> BuildMemory:
        """For `samples` of token ids; `whole_moments`: for methods that look at how inputs vary together."""
        layers: Counter[int] = Counter()
        for step in steps:
            layers[step.layer] += sum(4 * table[name].num_elements for name in step.weights() if ".layers." in name)
        outside = [4 * w.num_elements for name, w in table.items() if ".layers." not in name and len(w.shape) == 2]
        widths = [int(step.source.meta["val"].shape[-1]) for step in steps if step.source is not None]
        tokens = max(map(len, samples)) if spilled else sum(map(len, samples))
        hidden = widths[-1]
        vocab = int(steps[-1].nodes[-1].meta["val"].shape[-1])
        return cls(
            program=_PROGRAM,
            layers=2 * max(layers.values()),
            embedding=2 * max(outside, default=0),
            moments=3 * 4 * max(widths) ** 2 if whole_moments else 0,
            activations=4 * tokens * (max(widths) + 2 * hidden),
            logits=_LOGIT_COPIES * min(MAX_LOGIT_BYTES, 4 * vocab * 1024),
        )

    def as_json(self) -> dict[str, int]:
        """Bytes by part, and `total`."""
        return {name: getattr(self, name) for name in (*self.__slots__, "total")}
