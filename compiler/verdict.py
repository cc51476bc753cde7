"""Is this really int4? What the headers of a model file or folder claim, against the types and bytes of the tensors that are stored."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ..errors import CheckpointError, MissingExtraError

_LAYER = re.compile(r"(^|\.)(layers|blk|h)\.\d+\.")
_FLOATS: Final = ("F64", "F32", "F16", "BF16")
_SLACK: Final = 2.0  # bits: fallbacks for odd rows, and the finer types that mixed files give to some matrices
_STRAYS: Final = 0.05  # of the weights of the layers may be floats where the rest is quantised: routers and the like


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMatrix:
    """A matrix as its header describes it: `weights` numbers in `num_bytes` bytes, scales not counted except inside blocks."""

    name: str
    type_name: str
    weights: int
    num_bytes: int
    in_layer: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRow:
    """All matrices of one place and one type."""

    place: str
    type_name: str
    tensors: int
    weights: int
    num_bytes: int

    @property
    def bits(self) -> float:
        """Bits that a weight takes."""
        return 8 * self.num_bytes / self.weights if self.weights else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a file or folder claims to be, what it holds, and every contradiction between the two."""

    path: Path
    claimed: str
    rows: list[StoredRow] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether the claim holds."""
        return not self.problems

    @property
    def layer_bits(self) -> float:
        """Bits that a weight of the layers takes on average."""
        layers = [row for row in self.rows if row.place == "layers"]
        weights = sum(row.weights for row in layers)
        return 8 * sum(row.num_bytes for row in layers) / weights if weights else 0.0


def is_quantized(path: Path) -> Verdict:
    """Read the headers, and only those, of a GGUF file or a Hugging Face folder, and compare claim and contents.

    Raises `CheckpointError` if it is neither; damage is a problem of the verdict.
    """
    from .verdict_huggingface import judge_folder

    if path.is_dir():
        return judge_folder(path)
    if is_gguf(path):
        return _judge_gguf(path)
    raise CheckpointError(f"{path}: neither a GGUF file nor a folder with config.json and safetensors")


def is_gguf(path: Path) -> bool:
    """Whether the file begins as GGUF files do."""
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def tabulate(matrices: Iterable[StoredMatrix]) -> list[StoredRow]:
    """Rows by place and type, layers first, largest first."""
    sums: dict[tuple[str, str], list[int]] = {}
    for matrix in matrices:
        total = sums.setdefault(("layers" if matrix.in_layer else "embedding and head", matrix.type_name), [0, 0, 0])
        for index, value in enumerate((1, matrix.weights, matrix.num_bytes)):
            total[index] += value
    ordered = sorted(sums.items(), key=lambda item: (item[0][0] != "layers", -item[1][1]))
    return [
        StoredRow(place=place, type_name=type_name, tensors=count, weights=weights, num_bytes=size)
        for (place, type_name), (count, weights, size) in ordered
    ]


def in_layer(name: str) -> bool:
    """Whether a tensor belongs to a layer rather than to the embedding, the head or the final norm."""
    return _LAYER.search(name) is not None


def _judge_gguf(path: Path) -> Verdict:
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType
    except ModuleNotFoundError:
        raise MissingExtraError(
            f"{path}: reading GGUF needs the package 'gguf', which is not installed; run: pip install 'llmc[compile]'"
        ) from None
    from .checkpoint.gguf_reader import GgufReader

    try:
        reader = GgufReader(path)
    except CheckpointError as error:
        return Verdict(path=path, claimed="GGUF", problems=[str(error)])
    matrices = []
    for tensor in reader.tensors.values():
        if len(tensor.shape) >= 2:
            weights = 1
            for size in tensor.shape:
                weights *= size
            matrices.append(
                StoredMatrix(
                    name=tensor.name,
                    type_name=tensor.type_name,
                    weights=weights,
                    num_bytes=tensor.nbytes,
                    in_layer=in_layer(tensor.name),
                )
            )
    rows = tabulate(matrices)
    file_type = reader.metadata.get("general.file_type")
    known = {kind.value: kind.name for kind in LlamaFileType}
    if not isinstance(file_type, int) or known.get(file_type, "GUESSED") == "GUESSED":
        return Verdict(path=path, claimed="GGUF that names no type", rows=rows)
    name = known[file_type].removeprefix("MOSTLY_").removeprefix("ALL_")
    base = re.sub(r"_(S|M|L|XS|MOE)$", "", name) if name not in GGMLQuantizationType.__members__ else name
    if base not in GGMLQuantizationType.__members__:
        return Verdict(path=path, claimed=f"GGUF {name}", rows=rows)
    columns, size = GGML_QUANT_SIZES[GGMLQuantizationType[base]]
    bits = 8 * size / columns
    return Verdict(
        path=path, claimed=f"GGUF {name}, {bits:.3g} bits a weight", rows=rows, problems=_contradictions(name, bits, matrices)
    )


def _contradictions(name: str, bits: float, matrices: list[StoredMatrix]) -> list[str]:
    """Where the layers of a GGUF file are not of the type, or near the bits, that it claims."""
    layers = [matrix for matrix in matrices if matrix.in_layer]
    weights = sum(matrix.weights for matrix in layers)
    if not weights:
        return ["it holds no matrices of layers"]
    problems = []
    floats = [matrix for matrix in layers if matrix.type_name in _FLOATS]
    share = sum(matrix.weights for matrix in floats) / weights
    if bits < 16 and share > _STRAYS:
        problems.append(
            f"it claims {name}, but {len(floats)} of {len(layers)} matrices in layers, {share:.0%} of the weights, are stored "
            f"unquantised, first {floats[0].name} as {floats[0].type_name}"
        )
    found = 8 * sum(matrix.num_bytes for matrix in layers) / weights
    if not problems and found > bits + _SLACK:
        problems.append(f"it claims {name}, {bits:.3g} bits a weight, but the layers take {found:.3g}")
    if found < bits - 1:
        problems.append(f"it claims {name}, {bits:.3g} bits a weight, but the layers hold only {found:.3g}")
    return problems
