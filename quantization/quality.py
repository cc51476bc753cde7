"""How far one model's next-token distributions are from another's: divergence, agreement and likelihood, position by position."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

_ROWS = 128  # of logits that are worked on at a time: a vocabulary may have 262,144 entries


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Figures over all positions; `kl` is KL(reference || model) in nats.

    `flips`: positions where exactly one of the two models has the text's next token as its likeliest (Dutta et al. 2024); it counts what
    equal accuracies hide. `centred_cosine`: of the logits less their mean over the vocabulary, which would make any two models alike.
    """

    positions: int
    kl_mean: float
    kl_p95: float
    kl_max: float
    top1_agreement: float
    centred_cosine: float
    perplexity: float
    reference_perplexity: float
    flips: float

    def as_json(self) -> dict[str, float | int]:
        """The fields by name, rounded to six significant digits so that reports do not differ in noise."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {name: value if isinstance(value, int) else float(f"{value:.6g}") for name, value in values.items()}


@dataclass(slots=True)
class QualityMeter:
    """Collects positions; rows may come in any number of calls."""

    _kl: list[Tensor] = field(default_factory=list)
    _agree: list[Tensor] = field(default_factory=list)
    _cosine: list[Tensor] = field(default_factory=list)
    _right: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _nll: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def add(self, reference: Tensor, logits: Tensor, next_ids: Tensor) -> None:
        """Logits `[R, V]` of the reference and of the model, and the token `[R]` that follows in the text."""
        if reference.shape != logits.shape or len(next_ids) != len(logits):
            raise ValueError(f"logits have shape {tuple(logits.shape)}, expected {tuple(reference.shape)} and as many next ids")
        for start in range(0, len(logits), _ROWS):
            part = slice(start, start + _ROWS)
            self._add(reference[part].float(), logits[part].float(), next_ids[part])

    def _add(self, reference: Tensor, logits: Tensor, next_ids: Tensor) -> None:
        p, q = reference.log_softmax(-1), logits.log_softmax(-1)
        self._kl.append((p.exp() * (p - q)).sum(-1).clamp_min(0))
        best, other = p.argmax(-1), q.argmax(-1)
        self._agree.append(best == other)
        self._right.append((best == next_ids, other == next_ids))
        self._nll.append((-p.gather(-1, next_ids[:, None])[:, 0], -q.gather(-1, next_ids[:, None])[:, 0]))
        a, b = reference - reference.mean(-1, keepdim=True), logits - logits.mean(-1, keepdim=True)
        self._cosine.append(torch.nn.functional.cosine_similarity(a, b, dim=-1))

    def result(self) -> Quality:
        """The figures of everything added. Raises ValueError if nothing was."""
        if not self._kl:
            raise ValueError("no positions were added")
        kl = torch.cat(self._kl).double()
        right, also = (torch.cat(parts) for parts in zip(*self._right, strict=True))
        reference_nll, nll = (torch.cat(parts).double().mean() for parts in zip(*self._nll, strict=True))
        return Quality(
            positions=len(kl),
            kl_mean=float(kl.mean()),
            kl_p95=float(np.quantile(kl.numpy(), 0.95)),
            kl_max=float(kl.max()),
            top1_agreement=float(torch.cat(self._agree).double().mean()),
            centred_cosine=float(torch.cat(self._cosine).double().mean()),
            perplexity=float(nll.exp()),
            reference_perplexity=float(reference_nll.exp()),
            flips=float((right != also).double().mean()),
        )
