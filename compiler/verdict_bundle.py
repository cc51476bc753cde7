"""The verdict on a bundle: the scheme that each target names against the tensors that its program takes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..errors import LlmcError
from ..runtime.bundle import read_manifest, read_program
from ..runtime.program import WeightSpec
from ..runtime.verification import Check
from ..runtime.weights import tensor_bytes
from .verdict import in_layer

_WIDE = ("F32", "F16", "BF16")
_UNQUANTISED = ("f32", "f16", "bf16")


def judge_targets(root: Path) -> list[Check]:
    """One check for each target; for a bundle whose files have been checked already."""
    checks = []
    manifest = read_manifest(root)
    for entry in manifest.targets:
        try:
            program = read_program(root, manifest, entry, "full")
        except LlmcError as error:
            checks.append(Check(subject=entry.name, detail="scheme", problem=str(error)))
        else:
            checks.append(judge_weights(program.target, program.scheme.weights, program.weights))
    return checks


def judge_weights(target: str, scheme: str, weights: Sequence[WeightSpec]) -> Check:
    """Whether the matrices of the layers are stored as codes where the scheme is an integer or fp8 one, and as floats where it is not."""
    sizes: dict[str, int] = {}
    for spec in weights:
        # Biases and norms are vectors; scales belong to the matrix beside them.
        if in_layer(spec.name) and len(spec.shape) > 1 and not spec.name.endswith(".scale"):
            sizes[spec.dtype] = sizes.get(spec.dtype, 0) + tensor_bytes(spec.dtype, spec.shape)
    detail = f"scheme {scheme}, layers in " + ", ".join(f"{dtype} {size / 1e6:.2f} MB" for dtype, size in sorted(sizes.items()))
    wide = {dtype for dtype in sizes if dtype in _WIDE}
    problem = None
    if scheme in _UNQUANTISED and set(sizes) - wide:
        problem = f"{target}: scheme {scheme} is unquantised, but layers are stored as {', '.join(sorted(set(sizes) - wide))}"
    elif scheme not in _UNQUANTISED and sizes and wide == set(sizes):
        problem = f"{target}: scheme {scheme} is quantised, but all layers are stored as {', '.join(sorted(wide))}"
    return Check(subject=target, detail=detail, problem=problem)
