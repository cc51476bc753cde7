"""Which GGUF type each tensor is stored in, and why it is not the one that was asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Final, Literal

from ...errors import UsageError
from ...formats.grid import Grid
from .base import EMBEDDING, LM_HEAD, ExportModel
from .gguf_blocks import BLOCK, BLOCK_GRIDS, MATRIX_TYPES, block_columns, exact_type

How = Literal["exact", "rounded scale", "quantise", "floats"]

FILE_TYPES: Final = {  # general.file_type of a file whose matrices are mostly of one type (llama.h, llama_ftype)
    "F32": 0,
    "F16": 1,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q8_0": 7,
    "Q5_0": 8,
    "Q5_1": 9,
    "Q4_K": 14,
    "Q5_K": 16,
    "Q6_K": 18,
    "BF16": 32,
}
_FALLBACK: Final = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}  # for rows that are no multiple of 256, as llama.cpp does


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredType:
    """`how` says what becomes of a quantised matrix: its codes stay (`exact`, `rounded scale`) or its values are quantised anew."""

    type_name: str
    how: How


def choose_types(
    model: ExportModel, type_name: str, head_type: str | None, chosen: Mapping[str, str] | None = None
) -> tuple[dict[str, StoredType], list[str]]:
    """The stored type of every tensor, and a remark for each kind of exception.

    Matrices that are quantised already keep their codes where a block type holds their grid. Others take the type that `chosen` has for
    their name, else `type_name`, the embedding and the head `head_type` (by default 6 bits or more: they weigh on every logit). Vectors
    are float32, as llama.cpp needs them.
    """
    chosen = chosen or {}
    unknown = sorted(set(chosen) - model.tensor_names())
    if unknown:
        raise UsageError(f"export: a type is chosen for {unknown[0]!r}, which the model does not have")
    for option, value in (("type", type_name), ("head type", head_type or type_name), *chosen.items()):
        if value not in MATRIX_TYPES:
            raise UsageError(f"export: {option} {value!r} is unknown; choose one of {', '.join(MATRIX_TYPES)}")
    head = head_type or (type_name if type_name in ("Q8_0", "F32", "F16", "BF16") else "Q6_K")
    types: dict[str, StoredType] = {}
    remarks: Counter[str] = Counter()
    for name in sorted(model.tensor_names()):
        shape, grid = model.shape(name), model.grid(name)
        if len(shape) != 2:
            types[name] = StoredType(type_name="F32", how="floats")
        elif grid is not None and (kept := _keep(grid, shape[1], remarks)) is not None:
            types[name] = kept
        else:
            wanted = chosen.get(name, head if name in (EMBEDDING, LM_HEAD) else type_name)
            types[name] = _fit("Q8_0" if grid is not None else wanted, shape[1], remarks)
    return types, [f"{remark} (matrices: {count})" for remark, count in remarks.items()]


def file_type(types: dict[str, StoredType], model: ExportModel) -> int:
    """`general.file_type`: the type that most weights of the layers' matrices are stored in."""
    sizes: Counter[str] = Counter()
    for name, stored in types.items():
        shape = model.shape(name)
        if len(shape) == 2 and name not in (EMBEDDING, LM_HEAD):
            sizes[stored.type_name] += prod(shape)
    return FILE_TYPES[sizes.most_common(1)[0][0] if sizes else "F32"]


def _keep(grid: Grid, columns: int, remarks: Counter[str]) -> StoredType | None:
    exact = exact_type(grid, columns)
    if exact is not None:
        if BLOCK_GRIDS[exact].bits > grid.bits:
            remarks[f"{grid} is stored as {exact}: the same values in more bytes"] += 1
        return StoredType(type_name=exact, how="exact")
    if grid.group is None and columns % BLOCK == 0:
        remarks[f"{grid} keeps its codes in Q8_0, and its float32 scales are rounded to float16"] += 1
        return StoredType(type_name="Q8_0", how="rounded scale")
    remarks[f"{grid} with {columns} columns has no GGUF type, and is quantised a second time"] += 1
    return None


def _fit(type_name: str, columns: int, remarks: Counter[str]) -> StoredType:
    """`type_name`, or what llama.cpp falls back to for rows that are not whole blocks."""
    chosen = type_name
    if columns % block_columns(chosen):
        chosen = _FALLBACK.get(chosen, "F16")
        if columns % block_columns(chosen):
            chosen = "F16"
        remarks[f"{chosen} in place of {type_name}, for {columns} columns are no multiple of {block_columns(type_name)}"] += 1
    return StoredType(type_name=chosen, how="quantise" if block_columns(chosen) > 1 else "floats")
