"""Which type each tensor gets: kept grids, fallbacks for odd rows, the head, and remarks about them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from llmc.codegen.export.base import ExportModel
from llmc.codegen.export.gguf_types import choose_types, file_type
from llmc.errors import UsageError
from llmc.formats.grid import Grid

_UP, _DOWN = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"
_EMBEDDING, _NORM = "model.embed_tokens.weight", "model.norm.weight"


class _Model(ExportModel):
    def __init__(self, hidden: int, inner: int, **grids: Grid) -> None:
        self._shapes = {_UP: (inner, hidden), _DOWN: (hidden, inner), _EMBEDDING: (512, hidden), _NORM: (hidden,)}
        self._grids = {_UP: grids.get("up"), _DOWN: grids.get("down")}

    def tensor_names(self) -> frozenset[str]:
        return frozenset(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def grid(self, name: str) -> Grid | None:
        return self._grids.get(name)

    def tensor(self, name: str) -> torch.Tensor:
        raise NotImplementedError

    def write_tokenizer(self, out: Path) -> None:
        raise NotImplementedError


def _types(model: ExportModel, *options: str | None) -> tuple[dict[str, str], list[str]]:
    stored, remarks = choose_types(model, *options)  # type: ignore[arg-type]
    return {name: kind.type_name for name, kind in stored.items()}, remarks


@pytest.mark.parametrize(
    ("type_name", "fallback"), [("Q4_K", "Q5_0"), ("Q5_K", "Q5_1"), ("Q6_K", "Q8_0"), ("Q4_0", "Q4_0"), ("Q8_0", "Q8_0")]
)
def test_rows_that_are_no_whole_super_blocks(type_name: str, fallback: str) -> None:
    types, remarks = _types(_Model(640, 2048), type_name, None)
    assert types[_UP] == fallback
    assert types[_DOWN] == type_name
    assert types[_NORM] == "F32"
    assert types[_EMBEDDING] == "Q8_0"
    assert bool(remarks) == (type_name != "Q8_0")


def test_rows_that_are_no_whole_blocks_are_floats() -> None:
    types, remarks = _types(_Model(100, 256), "Q4_K", "Q8_0")
    assert types == {_UP: "F16", _DOWN: "Q4_K", _EMBEDDING: "F16", _NORM: "F32"}
    assert remarks[0] == "F16 in place of Q8_0, for 100 columns are no multiple of 32 (matrices: 1)"


def test_kept_grids_come_first_and_chosen_types_next() -> None:
    model = _Model(256, 256, up=Grid(bits=3, group=64))
    stored, remarks = choose_types(model, "Q4_K", None, {_DOWN: "Q6_K", _UP: "F16"})
    assert (stored[_UP].type_name, stored[_UP].how) == ("Q4_0", "exact")
    assert (stored[_DOWN].type_name, stored[_DOWN].how) == ("Q6_K", "quantise")
    assert remarks == ["int3-g64 is stored as Q4_0: the same values in more bytes (matrices: 1)"]
    with pytest.raises(UsageError, match="'nothing', which the model does not have"):
        choose_types(model, "Q4_K", None, {"nothing": "F16"})


def test_grids_without_a_type() -> None:
    model = _Model(256, 256, up=Grid(bits=8), down=Grid(bits=6, group=32, symmetric=False))
    stored, remarks = choose_types(model, "Q4_K", None)
    assert (stored[_UP].type_name, stored[_UP].how) == ("Q8_0", "rounded scale")
    assert (stored[_DOWN].type_name, stored[_DOWN].how) == ("Q8_0", "quantise")
    assert len(remarks) == 2


def test_the_file_type_is_that_of_most_weights() -> None:
    model = _Model(256, 256)
    stored, _ = choose_types(model, "Q4_K", "F16")
    assert file_type(stored, model) == 14
