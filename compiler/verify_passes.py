"""The instrument behind `--verify-each`: runs the graph before and after every pass and names the first that breaks the numbers."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from ..errors import VerificationError
from ..passes.base import Pass
from ..passes.graph import phases
from ..passes.manager import PassRecord
from .eager import evaluate
from .weights import WeightStore

DEFAULT_TOLERANCE = 1e-4


class VerifyPasses:
    """Compares logits of the same tokens on real weights; the error is the largest difference over the largest logit.

    A lossy pass sets a new reference; its error is kept in `errors` but does not fail.
    """

    def __init__(self, store: WeightStore, vocab_size: int, tolerance: float = DEFAULT_TOLERANCE, tokens: int = 24) -> None:
        self.store = store
        self.tolerance = tolerance
        self.token_ids = torch.randint(vocab_size, (tokens,), generator=torch.Generator().manual_seed(0))
        self.reference: Tensor | None = None
        self.errors: dict[str, float] = {}

    def before(self, step: Pass, module: fx.GraphModule) -> None:
        """Take the first reference from the traced graph itself."""
        if self.reference is None:
            self.reference = evaluate(module, self.store, self.token_ids)

    def after(self, step: Pass, module: fx.GraphModule, record: PassRecord) -> None:
        """Raises `VerificationError` when a pass that promises the same numbers changed them."""
        assert self.reference is not None
        if not record.changed:
            return
        for phase, graph in phases(module).items():
            logits = evaluate(graph, self.store, self.token_ids)
            difference = (logits - self.reference).abs()
            error = (difference.max() / self.reference.abs().max().clamp_min(1e-9)).item()
            self.errors[step.name] = max(error, self.errors.get(step.name, 0.0))
            if step.lossy:
                self.reference = logits
            elif not error <= self.tolerance:
                row, column = divmod(int(difference.argmax()), logits.shape[1])
                where = f"{step.name} ({phase})" if phase else step.name
                raise VerificationError(
                    f"verify-each: {where} changed the logits: relative error {error:.2e} at token {row}, vocabulary id {column} "
                    f"(found {logits[row, column]:.6g}, expected {self.reference[row, column]:.6g}), tolerance {self.tolerance:.0e}; "
                    f"compare the dumps before and after {step.name}"
                )
