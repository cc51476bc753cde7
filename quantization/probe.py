"""Texts that no quantiser has seen, with the unquantised model's logits on them: what changes to the model are held against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from .layerwise import Forward, ReadWeight, Step
from .quality import Quality, QualityMeter

MAX_LOGIT_BYTES = 512 << 20
"""What reference logits may take: a row of a 262,144-token vocabulary is a megabyte."""
_CHUNK_ROWS = 64


@dataclass(frozen=True, slots=True)
class Probe:
    """`samples` are token ids `[T]`; `rows` the positions of each whose logits count; `reference` those logits, float32 `[R, V]`."""

    samples: Sequence[Tensor]
    rows: Sequence[Tensor]
    reference: Sequence[Tensor]

    @classmethod
    def make(
        cls, module: fx.GraphModule, steps: Sequence[Step], samples: Sequence[Tensor], read: ReadWeight, max_rows: int = 1024
    ) -> Probe:
        """Run the unquantised model on `samples`; rows are spread evenly, at most `max_rows` and `MAX_LOGIT_BYTES` of them."""
        vocab = int(steps[-1].nodes[-1].meta["val"].shape[-1])
        count = max(1, min(max_rows, MAX_LOGIT_BYTES // (4 * vocab)) // max(len(samples), 1))
        rows = [_spread(len(sample) - 1, count) for sample in samples]
        unmeasured = cls(samples, rows, [])
        return cls(samples, rows, unmeasured.finish(Forward(module, steps, samples), 0, read))

    def finish(
        self, forward: Forward, start: int, read: ReadWeight, change: Callable[[fx.Node, Tensor], Tensor] | None = None
    ) -> list[Tensor]:
        """Logits `[R, V]` of each sample after running steps from number `start` on; `forward`, of any copy of the graph, is used up."""
        *_, before, last = forward.steps
        for step in forward.steps[start:]:
            if step is last:
                assert before.source is not None, "the head is a linear"
                forward.replace(before.source, lambda index, value: value[self.rows[index]])
            forward.run(step, read, change)
        return [value.clone() for value in forward.values(last.nodes[-1])]

    def compare(self, logits: Sequence[Tensor]) -> Quality:
        """The quality of logits for `rows` of each sample."""
        meter = QualityMeter()
        for sample, rows, reference, found in zip(self.samples, self.rows, self.reference, logits, strict=True):
            meter.add(reference, found, sample[rows + 1])
        return meter.result()

    def mean_kl(self, logits: Sequence[Tensor]) -> float:
        """The mean divergence alone, which is a small part of the work of `compare`."""
        total = 0.0
        for reference, found in zip(self.reference, logits, strict=True):
            for start in range(0, len(found), _CHUNK_ROWS):
                p = reference[start : start + _CHUNK_ROWS].log_softmax(-1)
                q = found[start : start + _CHUNK_ROWS].log_softmax(-1)
                total += float(torch.nn.functional.kl_div(q, p, reduction="sum", log_target=True))
        return total / self.num_rows()

    def reference_nll(self) -> float:
        """Mean nats that the unquantised model gives the texts' next tokens."""
        total = 0.0
        for sample, rows, logits in zip(self.samples, self.rows, self.reference, strict=True):
            total += float(torch.nn.functional.cross_entropy(logits, sample[rows + 1], reduction="sum"))
        return total / self.num_rows()

    def thinned(self, max_rows: int, max_length: int) -> Probe:
        """The beginnings of the texts, with at most so many rows in all and tokens each, for comparisons that are made often."""
        samples = [sample[: max_length + 1] for sample in self.samples]
        kept = [rows < len(sample) - 1 for rows, sample in zip(self.rows, samples, strict=True)]
        if not all(bool(k.any()) for k in kept):  # so few rows that there is nothing to save
            return self
        step = -(-sum(int(k.sum()) for k in kept) // max_rows)
        rows = [rows[k][::step] for rows, k in zip(self.rows, kept, strict=True)]
        reference = [logits[k][::step] for logits, k in zip(self.reference, kept, strict=True)]
        return Probe(samples, rows, reference)

    def num_rows(self) -> int:
        """Rows of all samples."""
        return sum(len(rows) for rows in self.rows)


def _spread(length: int, count: int) -> Tensor:
    """Up to `count` positions below `length`, evenly spread, the last among them."""
    if length <= count:
        return torch.arange(max(length, 0))
    return torch.linspace(length / count - 1, length - 1, count).round().long()
