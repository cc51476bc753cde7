"""Moving scales: no pair of any architecture changes the float model, and what would is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llmc.compiler.checkpoint import Checkpoint, open_checkpoint
from llmc.compiler.eager import evaluate
from llmc.compiler.trace import trace
from llmc.compiler.weights import WeightStore
from llmc.errors import PassError
from llmc.passes.canonicalise import Canonicalise
from llmc.passes.fuse_glu import FuseGlu
from llmc.passes.fuse_rms_norm import FuseRmsNorm
from llmc.passes.fuse_rope import FuseRope
from llmc.passes.graph import WeightTable
from llmc.passes.pipelines import calibration_graph
from llmc.quantization.pairs import AbsorbPair, Rows, find_pairs
from llmc.quantization.rescale import Rescaling, SourceFactors, prove
from torch import Tensor, fx


@dataclass
class Model:
    """A tiny model's graph as calibration sees it."""

    module: fx.GraphModule
    checkpoint: Checkpoint

    @property
    def pairs(self) -> tuple[AbsorbPair, ...]:
        return find_pairs(self.module).pairs

    def rescaling(self, pair: AbsorbPair, scale: Tensor) -> Rescaling:
        return Rescaling.of(pair, scale, WeightTable.of(self.module), self.checkpoint.shape)

    def logits(self, rescaling: Rescaling) -> Tensor:
        """Logits of 45 fixed tokens, past the sliding windows, on the rescaled checkpoint."""
        checkpoint = SimpleNamespace(
            tensor=lambda name: rescaling.apply(name, self.checkpoint.tensor(name)),
            tensor_names=self.checkpoint.tensor_names,
            path=self.checkpoint.path,
        )
        tokens = torch.randint(self.checkpoint.config.vocab_size, (45,), generator=torch.Generator().manual_seed(1))
        return evaluate(self.module, WeightStore(cast(Checkpoint, checkpoint)), tokens)


_MODELS: dict[str, Model] = {}


@pytest.fixture
def models(tiny_checkpoint: Callable[..., Path]) -> Callable[[str], Model]:
    """`models("llama")`, traced once, with two layers, so that a scale could leak into the next."""

    def make(architecture: str) -> Model:
        if architecture not in _MODELS:
            options = {"layer_types": ["sliding_attention", "full_attention"]} if architecture == "gemma3" else {}
            checkpoint = open_checkpoint(str(tiny_checkpoint(architecture, num_hidden_layers=2, **options)))
            _MODELS[architecture] = Model(calibration_graph(trace(checkpoint.config)), checkpoint)
        return _MODELS[architecture]

    return make


def _random_scale(width: int, seed: int, octaves: float = 3.0) -> Tensor:
    return torch.exp2((2 * torch.rand(width, generator=torch.Generator().manual_seed(seed)) - 1) * octaves)


def test_all_pairs_at_once_leave_the_logits_alone(architecture: str, models: Callable[[str], Model]) -> None:
    model = models(architecture)
    assert {pair.kind for pair in model.pairs} == {"norm-linear", "up-down", "v-o"}
    before = model.logits(Rescaling())
    for seed in range(3):
        rescaling = Rescaling()
        for i, pair in enumerate(model.pairs):
            rescaling = rescaling.then(model.rescaling(pair, _random_scale(pair.width, 100 * seed + i)))
        difference = (model.logits(rescaling) - before).abs().max() / before.abs().max()
        assert 0 < difference < 2e-5  # float32; not 0, or nothing was moved


def test_each_pair_is_proven(architecture: str, models: Callable[[str], Model]) -> None:
    model = models(architecture)
    for pair in model.pairs:
        assert prove(model.module, pair, model.checkpoint) < 1e-12


def test_a_factor_that_is_lost_shows_in_the_logits(models: Callable[[str], Model]) -> None:
    """The other half of the proof: every tensor that a pair touches matters."""
    model = models("qwen2")
    before = model.logits(Rescaling())
    touched = set()
    for pair in model.pairs[:4]:  # a layer
        whole = model.rescaling(pair, _random_scale(pair.width, 0))
        for source in whole:
            part = Rescaling({name: factors for name, factors in whole.items() if name != source})
            assert (model.logits(part) - before).abs().max() > 1e-3 * before.abs().max(), source
            touched.add(source.removeprefix("model.layers.0."))
    assert {"self_attn.v_proj.bias", "self_attn.o_proj.weight", "mlp.up_proj.weight", "input_layernorm.weight"} <= touched
    assert "self_attn.q_proj.bias" not in touched


def test_proof_refuses_wrong_pairs(models: Callable[[str], Model]) -> None:
    model = models("gemma3")
    norm, v_o, _, up_down = model.pairs[:4]
    shifted = tuple(Rows(name=rows.name, start=rows.start - 8, stop=rows.stop - 8) for rows in v_o.producer)
    wrong = [
        replace(norm, offset=0.0),
        replace(v_o, producer=shifted),
        replace(up_down, producer=(Rows(name=up_down.producer[0].name, start=0, stop=96),)),  # the gate
    ]
    for pair in wrong:
        with pytest.raises(PassError, match=r"equalise: .* -> .*expected at most 1e-09.*leave this pair out"):
            prove(model.module, pair, model.checkpoint)


def test_proof_looks_at_readers_that_a_pair_forgets(tiny_checkpoint: Callable[..., Path]) -> None:
    checkpoint = open_checkpoint(str(tiny_checkpoint("qwen3", num_hidden_layers=1)))
    module = trace(checkpoint.config)
    for step in (Canonicalise(), FuseRmsNorm(), FuseRope(), FuseGlu()):  # q, k and v are three linears
        step.run(module)
    pair = find_pairs(module).pairs[0]
    assert prove(module, pair, checkpoint) < 1e-12
    with pytest.raises(PassError, match="leave this pair out"):
        prove(module, replace(pair, consumers=pair.consumers[:2]), checkpoint)


def test_factors_go_to_the_checkpoint_tensors_they_belong_to(models: Callable[[str], Model]) -> None:
    model = models("llama")
    norm, v_o = model.pairs[:2]
    layer = "model.layers.0"
    scale = _random_scale(norm.width, 0)
    attention = model.rescaling(norm, scale)
    assert set(attention) == {f"{layer}.input_layernorm.weight", *(f"{layer}.self_attn.{p}_proj.weight" for p in "qkv")}
    w = torch.randn(32, norm.width)
    torch.testing.assert_close(attention.apply(f"{layer}.self_attn.v_proj.weight", w.bfloat16()), w.bfloat16().float() * scale)
    values = model.rescaling(v_o, v_o.tie(_random_scale(v_o.width, 1)))
    assert set(values) == {f"{layer}.self_attn.v_proj.weight", f"{layer}.self_attn.o_proj.weight"}
    assert torch.equal(values.apply("model.embed_tokens.weight", w), w)
    assert len(model.rescaling(norm, torch.ones(norm.width))) == 0


@pytest.mark.parametrize("scale", [torch.ones(63), torch.zeros(64), torch.full((64,), float("nan")), -torch.ones(64)])
def test_refuses_scales_that_cannot_be_divided_by(models: Callable[[str], Model], scale: Tensor) -> None:
    model = models("llama")
    with pytest.raises(PassError, match=r"input_layernorm.*expected 64 positive, finite scales, found shape"):
        model.rescaling(model.pairs[0], scale)


_factors = st.builds(
    lambda parts, seed: SourceFactors(
        divisor=_random_scale(6, seed) if "rows" in parts else None,
        multiplier=_random_scale(5, seed + 1) if "columns" in parts else None,
    ),
    st.sets(st.sampled_from(["rows", "columns"]), min_size=1),
    st.integers(0, 1000),
)
_norms = st.integers(0, 1000).map(lambda seed: SourceFactors(divisor=_random_scale(6, seed), offset=1.0))
_rescalings = st.builds(
    lambda matrices, norm: Rescaling(matrices | ({} if norm is None else {"norm": norm})),
    st.dictionaries(st.sampled_from(["a", "b", "c"]), _factors),
    st.none() | _norms,
)


@settings(deadline=None, max_examples=30)
@given(first=_rescalings, second=_rescalings)
def test_composition_is_one_after_the_other_and_survives_storage(first: Rescaling, second: Rescaling) -> None:
    both = first.then(second)
    stored = Rescaling.from_arrays(both.to_arrays())
    assert set(both) == set(first) | set(second) == set(stored)
    tensors = {name: torch.randn(6, 5, dtype=torch.float64) for name in "abc"} | {"norm": torch.randn(6, dtype=torch.float64)}
    for name, tensor in tensors.items():
        expected = second.apply(name, first.apply(name, tensor))
        torch.testing.assert_close(both.apply(name, tensor), expected, rtol=1e-6, atol=1e-6)
        assert torch.equal(stored.apply(name, tensor), both.apply(name, tensor))
        assert both.apply(name, tensor.float()).dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("w/divisor", np.array([1.0, 0.0], np.float32)),
        ("w/multiplier", np.array([1.0, np.inf], np.float32)),
        ("w/zero", np.ones(2, np.float32)),
        ("/divisor", np.ones(2, np.float32)),
        ("w/divisor", np.ones((2, 2), np.float32)),
    ],
)
def test_refuses_arrays_it_cannot_have_written(name: str, array: np.ndarray[Any, Any]) -> None:
    with pytest.raises(PassError, match=r"rescaling: array .* is no divisor, multiplier or offset"):
        Rescaling.from_arrays({name: array})


def test_refuses_tensors_of_another_model() -> None:
    rescaling = Rescaling({"w": SourceFactors(multiplier=torch.ones(4) * 2)})
    for tensor in (torch.ones(3, 5), torch.ones(4)):
        with pytest.raises(PassError, match=r"w has shape .* belong to another model"):
            rescaling.apply("w", tensor)
