"""Sampling parameters are checked when made, and unset ones come from the model."""

from __future__ import annotations

import dataclasses

import pytest
from llmc.errors import RequestError
from llmc.runtime import SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0), ("max_tokens", 1.5), ("max_tokens", True), ("max_tokens", None), ("temperature", -0.1),
        ("temperature", float("nan")), ("temperature", float("inf")), ("temperature", "hot"), ("top_k", -1),
        ("top_k", 1.5), ("top_p", 0), ("top_p", 1.01), ("top_p", True), ("min_p", -0.1), ("min_p", 1.1), ("seed", -1),
        ("seed", 2**64), ("stop", ""), ("stop", ["a", ""]), ("stop", [1]), ("stop", 7), ("stop", ["x"] * 65),
        ("stop_token_ids", [-1]), ("stop_token_ids", ["a"]), ("stop_token_ids", 5), ("ignore_eos", 1),
    ],
)  # fmt: skip
def test_values_out_of_range(name: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_extremes_are_allowed() -> None:
    SamplingParams(max_tokens=1, temperature=0, top_k=0, top_p=1, min_p=0, seed=2**64 - 1, stop="x", stop_token_ids={0})
    assert SamplingParams(stop="abc").stop == ("abc",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().max_tokens = 3  # type: ignore[misc]


def chosen(params: SamplingParams) -> tuple[object, ...]:
    return (params.temperature, params.top_k, params.top_p, params.min_p)


def test_defaults_of_the_model() -> None:
    config = {"do_sample": True, "top_k": 64, "top_p": 0.95, "eos_token_id": 1}
    defaults = SamplingParams.from_generation_config(config)
    assert chosen(SamplingParams().resolve(defaults)) == (1.0, 64, 0.95, 0.0)
    assert chosen(SamplingParams(temperature=0.0, top_k=0, top_p=1.0).resolve(defaults)) == (0.0, 0, 1.0, 0.0)
    assert SamplingParams(max_tokens=7, seed=3).resolve(defaults).max_tokens == 7
    for greedy in ({}, {"temperature": 0.7}, {"do_sample": False, "top_k": 50}):
        assert chosen(SamplingParams().resolve(SamplingParams.from_generation_config(greedy))) == (0.0, 0, 1.0, 0.0)


def test_a_bad_generation_config_does_not_break_the_model() -> None:
    config = {"do_sample": True, "temperature": -1, "top_k": 2.5, "top_p": "x", "min_p": 0.1}
    assert chosen(SamplingParams().resolve(SamplingParams.from_generation_config(config))) == (1.0, 0, 1.0, 0.1)
