"""Static steps: the search keeps what matters and cuts what does not, and steps travel in the names of formats."""

from __future__ import annotations

import pytest
import torch
from llmc.formats.static_step import split_step, with_step
from llmc.passes.dialect import round_rows
from llmc.quantization.static_steps import find_step
from torch import Tensor


def output_error(x: Tensor, weight: Tensor, format: str, step: float) -> float:
    """Mean over tokens of the relative squared error of the products."""
    exact = x @ weight.T
    error = round_rows(x, with_step(format, step)) @ weight.T - exact
    return float((error.square().sum(1) / exact.square().sum(1)).mean())


@pytest.mark.parametrize(("format", "largest"), [("w8a8", 127.0), ("fp8", 448.0), ("fp8-fnuz", 240.0)])
def test_even_inputs_use_the_whole_range(format: str, largest: float) -> None:
    x = torch.rand(300, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    step = find_step(lambda: [x[:100], x[100:]], [torch.ones(8, 64)], format)
    assert 0.9 < step * largest / float(x.abs().amax()) < 1.01


def test_rare_outliers_are_cut_only_where_weights_ignore_them() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(500, 64, generator=generator)
    x[::50, 3] *= 100
    weight = torch.randn(32, 64, generator=generator)
    deaf = weight.clone()
    deaf[:, 3] = 0
    amax = float(x.abs().amax())
    found = find_step(lambda: [x], [deaf], "w8a8")
    assert found * 127 < 0.1 * amax
    assert output_error(x, deaf, "w8a8", found) < 0.1 * output_error(x, deaf, "w8a8", amax / 127)
    for w in (weight, deaf):
        found = find_step(lambda: [x], [w], "w8a8")
        assert output_error(x, w, "w8a8", found) <= 1.05 * output_error(x, w, "w8a8", amax / 127)


def test_inputs_of_zeros_have_a_step() -> None:
    step = find_step(lambda: [torch.zeros(5, 16)], [torch.ones(2, 16)], "w8a8")
    assert (round_rows(torch.zeros(5, 16), with_step("w8a8", step)) == 0).all()


def test_steps_travel_in_names() -> None:
    for step in (1.0, 0.1, 1e-30, 3.4e38, 0.012345678):
        found = split_step(with_step("fp8", step))
        assert found == ("fp8", pytest.approx(step, rel=1e-8))
        assert split_step(with_step(with_step("fp8", 7.0), step)) == found
    for name in ("w8a8", "int4-g32", "int4-g32-static0.5", "w8a8-static", "w8a8-static-1", "w8a8-staticnan", "fp8-static0"):
        assert split_step(name) == (name, None)
