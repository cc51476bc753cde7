"""Compiled bundles against Hugging Face: the same logits at every length, over decode steps, and in mixed batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import llmc
import numpy as np
import pytest
import torch
from llmc.codegen.cpu.backend import QUANTIZATIONS
from llmc.codegen.cpu.formats import decode_matrix
from llmc.passes.quantize import QuantizeOptions

LENGTHS = (1, 2, 7, 63, 64, 65, 300)  # one token, around the block and tile sizes, past the window and the step's token limit
DECODE_STEPS = 40


def _tokens(count: int, vocab_size: int = 301, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab_size, count).tolist()


def _greedy(max_tokens: int) -> llmc.SamplingParams:
    return llmc.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


@torch.no_grad()
def _reference(model: Any, tokens: list[int]) -> np.ndarray:
    return model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()


def test_logits_equal_hugging_face(tiny_bundle: Callable[..., Path], tiny_model: Callable[..., Any], architecture: str) -> None:
    model = tiny_model(architecture)
    with llmc.load(tiny_bundle(architecture, "f32")) as engine:
        for length in LENGTHS:
            tokens = _tokens(length, seed=length)
            np.testing.assert_allclose(engine.logits(tokens), _reference(model, tokens), rtol=0, atol=2e-4, err_msg=str(length))


def test_decode_steps_equal_hugging_face(
    tiny_bundle: Callable[..., Path], tiny_model: Callable[..., Any], architecture: str
) -> None:
    model = tiny_model(architecture)
    with llmc.load(tiny_bundle(architecture, "f32")) as engine:
        for length in LENGTHS:
            prompt = _tokens(length, seed=length)
            generated = engine.generate(prompt, _greedy(DECODE_STEPS)).token_ids
            assert len(generated) == DECODE_STEPS
            logits = _reference(model, prompt + generated[:-1])[length - 1 :]
            chosen = logits[np.arange(DECODE_STEPS), generated]
            np.testing.assert_array_less(logits.max(-1) - chosen, 4e-4, err_msg=str(length))


@pytest.mark.parametrize("quantization", ["f32", "bf16", "int8", "int4-g32"])
def test_a_batch_gives_each_sequence_what_it_gets_alone(
    tiny_bundle: Callable[..., Path], architecture: str, quantization: str
) -> None:
    prompts = [_tokens(length, seed=length) for length in (1, 300, 2, 65, 7, 64)]
    with llmc.load(tiny_bundle(architecture, quantization)) as engine:
        alone = [engine.generate(prompt, _greedy(12)).token_ids for prompt in prompts]
        together = [output.token_ids for output in engine.generate(prompts, _greedy(12))]
    assert together == alone


@pytest.mark.parametrize("quantization", ["bf16", "int8", "int8-channel", "int4-g32", "int4-g128"])
def test_quantised_logits_are_those_of_the_decoded_weights(
    tiny_bundle: Callable[..., Path], tiny_model: Callable[..., Any], architecture: str, quantization: str
) -> None:
    """What is left between the bundle and HF on the decoded weights is bfloat16 rounding of KV and, for bf16, of activations."""
    assert _error(tiny_bundle(architecture, quantization), tiny_model(architecture), QUANTIZATIONS[quantization]) < 0.03


def test_a_tied_embedding_may_have_any_format(
    tiny_checkpoint: Callable[..., Path], tiny_model: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    formats = QuantizeOptions(weights="f16", head="int3-g32-asym")
    monkeypatch.setitem(QUANTIZATIONS, "fp16", formats)
    llmc.compile(tiny_checkpoint("gemma3"), target="cpu-fp16", cpu_levels=("native",), output=tmp_path / "out")
    assert _error(tmp_path / "out", tiny_model("gemma3"), formats) < 0.03


def _error(bundle: Path, model: Any, formats: QuantizeOptions) -> float:
    """The distance of a bundle's logits from those of the decoded weights, relative to these."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                stored = formats.head if "embed_tokens" in name or "lm_head" in name else formats.weights
                parameter.copy_(torch.from_numpy(decode_matrix(parameter.numpy(), stored)))
    tokens = _tokens(100)
    expected = _reference(model, tokens)
    with llmc.load(bundle) as engine:
        return float(np.linalg.norm(engine.logits(tokens) - expected) / np.linalg.norm(expected))
