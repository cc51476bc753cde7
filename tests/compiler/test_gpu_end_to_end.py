"""GPU bundles through the interpreter, or on the GPU that LLMC_TEST_GPU names, against the CPU float32 bundle and the eager graph."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import llmc
import numpy as np
import pytest
import torch
from llmc.codegen import ProgramOptions, make_backend
from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.eager import evaluate
from llmc.compiler.trace import trace
from llmc.compiler.weights import WeightStore
from llmc.formats.static_step import with_step
from llmc.passes.quantize import Quantize
from llmc.targets import resolve_target

pytestmark = pytest.mark.slow

_DEVICE = os.environ.get("LLMC_TEST_GPU")  # a device such as h200, where there is one: its targets are run on it
EXECUTOR: Literal["cuda", "interpreter"] = "cuda" if _DEVICE else "interpreter"
LENGTHS = (1, 17, 39)  # one token; past a KV block; past the tiny models' window and two whole prefill steps
TOKENS = 24
NOISE = 0.02  # what rounding activations and KV to bf16 may do to a logit, as a share of the largest
BOUNDS = {"fp8": (0.12, 0.25), "int8": (0.05, 0.1), "int4": (0.04, 0.6)}
"""Relative errors of the tiny models' logits: against the graph, where bf16 moves a number over a rounding border; and of the format."""
QUANTISED = [
    ("llama", "h100-fp8", None),
    ("gemma3", "h100-fp8", "fp8"),
    ("qwen2", "mi300x-fp8", None),
    ("llama", "rtx4090-int4", "int8"),
    ("phi3", "a100-int4", None),
    ("qwen3", "a100-int8", "int8"),
]


def _on_device(target: str) -> str:
    """The target of the same scheme for the GPU here, if there is one."""
    return f"{_DEVICE}-{target.partition('-')[2]}" if _DEVICE else target


def _tokens(count: int) -> list[int]:
    return np.random.default_rng(count).integers(0, 301, count).tolist()


def _greedy(max_tokens: int) -> llmc.SamplingParams:
    return llmc.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="session")
def rounded_checkpoint(tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny checkpoint whose weights are bf16 numbers, so that a bf16 program has the same ones as a float32 program."""
    from safetensors.torch import load_file, save_file

    made: dict[str, Path] = {}

    def make(architecture: str) -> Path:
        if architecture not in made:
            folder = made[architecture] = tmp_path_factory.mktemp("rounded") / architecture
            folder.mkdir()
            for path in tiny_checkpoint(architecture).iterdir():
                (folder / path.name).write_bytes(path.read_bytes())
            weights = load_file(folder / "model.safetensors")
            rounded = {name: w.to(torch.bfloat16).to(torch.float32) for name, w in weights.items()}
            save_file(rounded, folder / "model.safetensors", {"format": "pt"})
        return made[architecture]

    return make


@pytest.fixture(scope="session")
def gpu_bundle(rounded_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`gpu_bundle("llama", "h100-bf16")` -> a bundle for that target, of steps of up to 16 tokens."""
    made: dict[tuple[str, str, str], Path] = {}

    def make(architecture: str, target: str, kv_dtype: str | None = None) -> Path:
        key = (architecture, _on_device(target), kv_dtype)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("bundles") / "model.llmc"
            checkpoint = rounded_checkpoint(architecture)
            llmc.compile(checkpoint, target=_on_device(target), kv_dtype=kv_dtype, max_tokens=16, output=made[key])
        return made[key]

    return make


@pytest.fixture(scope="session")
def float_bundle(rounded_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`float_bundle("llama")` -> the CPU float32 bundle of the same weights."""
    made: dict[str, Path] = {}

    def make(architecture: str) -> Path:
        if architecture not in made:
            made[architecture] = tmp_path_factory.mktemp("floats") / "model.llmc"
            checkpoint = rounded_checkpoint(architecture)
            llmc.compile(checkpoint, target="cpu-f32", cpu_levels=("native",), output=made[architecture])
        return made[architecture]

    return make


def test_bf16_gives_the_tokens_of_the_cpu(
    gpu_bundle: Callable[..., Path], float_bundle: Callable[[str], Path], architecture: str
) -> None:
    """Three prompts in one batch: prefill in chunks, beside decoding sequences. Tokens differ only where float32 has a tie within noise."""
    prompts = [_tokens(length) for length in LENGTHS]
    with llmc.load(gpu_bundle(architecture, "h100-bf16"), executor=EXECUTOR) as engine:
        generated = [output.token_ids for output in engine.generate(prompts, _greedy(TOKENS))]
    equal = 0
    with llmc.load(float_bundle(architecture)) as engine:
        expected = [output.token_ids for output in engine.generate(prompts, _greedy(TOKENS))]
        for prompt, tokens, wanted in zip(prompts, generated, expected, strict=True):
            assert len(tokens) == TOKENS
            equal += tokens == wanted
            logits = engine.logits(prompt + tokens[:-1])[len(prompt) - 1 :]
            behind = logits.max(-1) - logits[np.arange(TOKENS), tokens]
            assert (behind <= NOISE * np.abs(logits).max()).all(), (behind, tokens, wanted)
    assert equal >= 1, f"only {equal} of 3 sequences are the same to the last token"


@pytest.mark.parametrize(("model", "target", "kv_dtype"), QUANTISED)
def test_quantised_logits_are_those_of_the_graph(
    gpu_bundle: Callable[..., Path],
    float_bundle: Callable[[str], Path],
    rounded_checkpoint: Callable[[str], Path],
    model: str,
    target: str,
    kv_dtype: str | None,
) -> None:
    """Against the eager graph with the same formats only bf16 and KV rounding are left; against float32 the formats' own error."""
    tokens = _tokens(LENGTHS[-1])
    checkpoint = open_checkpoint(str(rounded_checkpoint(model)))
    backend = make_backend(resolve_target(_on_device(target)), ProgramOptions(cache=Path("unused")))
    module = trace(checkpoint.config)
    for step in backend.pipeline():
        step.run(module)
        if isinstance(step, Quantize):
            break
    graph = evaluate(module, WeightStore(checkpoint, backend.decode_matrix), torch.tensor(tokens)).numpy()
    with llmc.load(gpu_bundle(model, target, kv_dtype), executor=EXECUTOR) as engine:
        found = engine.logits(tokens)
        alone = engine.generate(tokens, _greedy(4)).token_ids
        batch = engine.generate([_tokens(17), tokens, _tokens(1)], _greedy(4))
        assert batch[1].token_ids == alone
    with llmc.load(float_bundle(model)) as engine:
        floats = engine.logits(tokens)
    to_graph, own = BOUNDS[target.partition("-")[2]]
    assert _error(found, graph) < to_graph + (0.05 if kv_dtype else 0.0)
    assert _error(graph, floats) < own
    assert 0.01 < _error(found, floats) < own + to_graph


@pytest.mark.parametrize(("model", "target"), [("llama", "h100-fp8"), ("gemma3", "a100-int8")])
def test_static_activations_are_calibrated(
    rounded_checkpoint: Callable[[str], Path], float_bundle: Callable[[str], Path], tmp_path: Path, model: str, target: str
) -> None:
    """The bundle computes what the graph does whose formats carry the steps of the report."""
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"token_ids": _tokens(30 + i)}) + "\n" for i in range(16)))
    target, tokens = _on_device(target), _tokens(LENGTHS[-1])
    options = {"static_activations": True, "method": "rtn", "calibration": texts, "calibration_samples": 16}
    path = rounded_checkpoint(model)
    report = llmc.compile(path, target=target, max_tokens=16, output=tmp_path / "m.llmc", **options)
    backend = make_backend(resolve_target(target), ProgramOptions(cache=Path("unused")))
    kind = backend.quantization.weights
    steps = {row.name: row.input_step for row in report.quantization[target].matrices() if row.input_step is not None}
    formats = {name: with_step(kind, step) for name, step in steps.items()}
    checkpoint = open_checkpoint(str(path))
    module = trace(checkpoint.config)
    for step in make_backend(resolve_target(target), ProgramOptions(cache=Path("unused"), formats=formats)).pipeline():
        step.run(module)
        if isinstance(step, Quantize):
            break
    graph = evaluate(module, WeightStore(checkpoint, backend.decode_matrix), torch.tensor(tokens)).numpy()
    with llmc.load(tmp_path / "m.llmc", executor=EXECUTOR) as engine:
        found = engine.logits(tokens)
    with llmc.load(float_bundle(model)) as engine:
        floats = engine.logits(tokens)
    to_graph, own = BOUNDS[target.partition("-")[2]]
    assert len(steps) == len(set(steps.values())) >= 8
    assert _error(found, graph) < to_graph
    assert 0.01 < _error(graph, floats) < own


def _error(found: Any, expected: Any) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
