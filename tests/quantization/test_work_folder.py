"""work-folder: parts come back as they were written; another run's parts are never taken for this one's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from llmc.errors import UsageError
from llmc.formats.grid import Grid
from llmc.formats.round_to_nearest import round_to_nearest
from llmc.quantization.work_folder import WorkFolder

KEY = {"model": "m", "method": "gptq"}


def test_matrices_come_back_to_the_bit(tmp_path: Path) -> None:
    folder = WorkFolder(tmp_path / "w", KEY, resume=False)
    w = torch.randn(20, 70, generator=torch.Generator().manual_seed(0))
    grids = [Grid(bits=4, group=32), Grid(bits=3, group=64, symmetric=False), Grid(bits=8)]
    matrices = {str(grid): round_to_nearest(w, grid) for grid in grids}
    part = folder.part("layer", ["a", 1])
    assert not part.exists
    part.write(matrices, {"scale": np.arange(3, dtype=np.float32)}, {"records": [1, 2]})
    again = WorkFolder(tmp_path / "w", KEY, resume=True).part("layer", ["a", 1])
    assert again.exists
    assert list(again.names()) == sorted(matrices)
    for name, matrix in matrices.items():
        np.testing.assert_array_equal(again.matrix(name).dequantize(), matrix.dequantize())
        assert again.matrix(name).grid == matrix.grid
    np.testing.assert_array_equal(again.arrays()["scale"], [0, 1, 2])
    assert again.record() == {"records": [1, 2]}
    assert not folder.part("layer", ["a", 2]).exists


def test_without_resume_everything_is_made_anew(tmp_path: Path) -> None:
    WorkFolder(tmp_path / "w", KEY, resume=False).part("p", 0).write({}, {}, None)
    assert not WorkFolder(tmp_path / "w", KEY, resume=False).part("p", 0).exists


def test_resuming_something_else_names_what_differs(tmp_path: Path) -> None:
    WorkFolder(tmp_path / "w", KEY, resume=False)
    with pytest.raises(UsageError, match="was made with method='gptq', this run has 'awq'"):
        WorkFolder(tmp_path / "w", {**KEY, "method": "awq"}, resume=True)
    (tmp_path / "other").mkdir()
    with pytest.raises(UsageError, match="was not left by a quantisation"):
        WorkFolder(tmp_path / "other", KEY, resume=True)
