from __future__ import annotations

import pytest
import torch
from llmc.errors import PassError
from llmc.quantization.second_moment import SecondMoment


@pytest.mark.parametrize("width", [1, 70, 1100])  # one block of the triangle, and three of which the last is short
def test_samples_add_up_to_the_moments_of_all_tokens(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(300, width, generator=generator) * torch.rand(width, generator=generator)
    x[:, 0] *= 100
    moment = SecondMoment(width)
    for sample in x.split([1, 180, 19, 100]):
        moment.update(sample)
    wide = x.double()
    torch.testing.assert_close(moment.hessian().double(), 2 * wide.T @ wide / 300, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(moment.importance.double(), wide.square().mean(0), rtol=1e-5, atol=0)
    torch.testing.assert_close(moment.mean_abs.double(), wide.abs().mean(0), rtol=1e-5, atol=0)
    assert torch.equal(moment.amax, x.abs().amax(0))
    assert (moment.tokens, moment.samples) == (300, 4)


def test_the_matrix_may_be_looked_at_between_samples() -> None:
    x = torch.randn(64, 40, generator=torch.Generator().manual_seed(0))
    looked, straight = SecondMoment(40), SecondMoment(40)
    for sample in x.split(16):
        looked.update(sample)
        looked.hessian()
        straight.update(sample)
    assert torch.equal(looked.hessian(), straight.hessian())
    assert torch.equal(looked.hessian(), looked.hessian().T)


def test_a_long_run_keeps_its_scale() -> None:
    moment = SecondMoment(3)
    x = torch.full((64, 3), 300.0, dtype=torch.bfloat16)
    for _ in range(500):
        moment.update(x)
    torch.testing.assert_close(moment.hessian(), torch.full((3, 3), 2 * 300.0**2), rtol=1e-4, atol=0)


def test_each_half_of_the_samples_has_its_own_largest_values() -> None:
    moment = SecondMoment(2)
    for sample in range(6):
        moment.update(torch.tensor([[1.0, -4.0 if sample % 2 else 1.0]]))
    assert moment.half_amax.tolist() == [[1.0, 1.0], [1.0, 4.0]]


def test_the_diagonal_alone_refuses_to_give_a_matrix() -> None:
    moment = SecondMoment(8, name="layers.0.mlp.up_proj", diagonal_only=True)
    moment.update(torch.ones(2, 8))
    assert torch.equal(moment.importance, torch.ones(8))
    with pytest.raises(PassError, match=r"layers\.0\.mlp\.up_proj: only the diagonal"):
        moment.hessian()


def test_inputs_that_do_not_fit_are_refused_and_change_nothing() -> None:
    moment = SecondMoment(4, name="o_proj")
    with pytest.raises(PassError, match=r"o_proj: calibration inputs have shape \[2, 5\], expected \[tokens, 4\]"):
        moment.update(torch.ones(2, 5))
    for bad in (float("nan"), float("inf")):
        x = torch.ones(2, 4)
        x[1, 3] = bad
        with pytest.raises(PassError, match="o_proj: calibration input of channel 3 is not finite"):
            moment.update(x)
    moment.update(torch.ones(0, 4))
    assert (moment.tokens, moment.samples) == (0, 0)
    with pytest.raises(PassError, match="o_proj: no calibration input reached this layer"):
        moment.hessian()
