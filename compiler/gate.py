"""The last check of a quantised bundle: the finished thing, run as users run it, against the unquantised model."""

from __future__ import annotations

from pathlib import Path

import torch

from ..errors import QualityError
from ..quantization.probe import Probe
from ..quantization.quality import Quality
from ..runtime.loading import load


def measure_bundle(root: Path, target: str, probe: Probe) -> Quality:
    """The quality of a CPU target of the bundle at `root` on the probe's texts."""
    with load(root, target=target, executor="cpu", verify="sizes", max_num_seqs=1) as engine:
        logits = [
            torch.from_numpy(engine.logits(sample.tolist()))[rows]
            for sample, rows in zip(probe.samples, probe.rows, strict=True)
        ]
    return probe.compare(logits)


def check_limit(quality: Quality, target: str, max_kl: float | None) -> None:
    """Raises `QualityError` where the mean KL is above the limit."""
    if max_kl is not None and quality.kl_mean > max_kl:
        raise QualityError(
            f"--max-kl {max_kl:g}: the finished {target} program has a mean KL of {quality.kl_mean:.4g} over {quality.positions} "
            "positions; nothing is written; allow more, or raise --memory-budget"
        )
