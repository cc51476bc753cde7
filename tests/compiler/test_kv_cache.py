"""Packed keys and values, layer by layer: what the eager graph predicts, the same bits however a sequence is cut, memory as computed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llmc
import numpy as np
import pytest
import torch
from llmc.codegen import ProgramOptions, make_backend
from llmc.compiler import options as compile_options
from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.eager import evaluate
from llmc.compiler.inspection import open_inspection
from llmc.compiler.trace import trace
from llmc.compiler.weights import WeightStore
from llmc.passes.graph import phases
from llmc.passes.manager import PassManager
from llmc.passes.quantize_kv import KvOptions, QuantizeKv
from llmc.runtime.executor import StepBatch
from llmc.targets import resolve_target

LAYERS = ("int4", "int8", "fp8")  # of a model with two windows of 37 tokens and one full layer
TOKENS = np.random.default_rng(0).integers(0, 301, 300).tolist()


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: Callable[..., Path]) -> Path:
    return tiny_checkpoint("gemma3")


@pytest.fixture(scope="module")
def compiled(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A bundle with `LAYERS`, and its compile report."""
    path = tmp_path_factory.mktemp("kv") / "model.llmc"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile_options, "ProgramOptions", lambda **given: ProgramOptions(**{**given, "kv_layers": LAYERS}))
        report = llmc.compile(checkpoint, target="cpu-f32", max_tokens=128, cpu_levels=("portable",), output=path)
    return path, report


def test_logits_are_those_of_the_eager_graph(checkpoint: Path, compiled: tuple[Path, Any]) -> None:
    opened = open_checkpoint(str(checkpoint))
    module = trace(opened.config)
    backend = make_backend(resolve_target("cpu-f32"), ProgramOptions(kv_layers=LAYERS, cache=Path("unused")))
    PassManager(backend.pipeline()).run(module)
    store = WeightStore(opened, backend.decode_matrix)
    expected = evaluate(phases(module)["prefill"], store, torch.tensor(TOKENS)).numpy()
    QuantizeKv(KvOptions()).run(phases(module)["prefill"])
    exact = evaluate(phases(module)["prefill"], store, torch.tensor(TOKENS)).numpy()
    with llmc.load(compiled[0]) as engine:
        found = engine.logits(TOKENS)
    # Levels sum in other orders, so a number here and there rounds to its other neighbour.
    difference = np.linalg.norm(found - expected)
    assert difference < 0.1 * np.linalg.norm(exact - expected)


def test_bits_do_not_depend_on_steps_or_batches(compiled: tuple[Path, Any]) -> None:
    with llmc.load(compiled[0], max_num_seqs=4) as engine:
        expected = engine.logits(TOKENS)
        step = engine.executor.step
        for slot, lengths in enumerate(([128, 1, 1, 128, 42], [7, 100, 1, 1, 1, 90, 100])):
            blocks, start = engine.pool.allocate(19), 0
            for length in lengths:
                batch = StepBatch.build([(TOKENS[start : start + length], start, blocks)], range(length), [(slot, 0)])
                np.testing.assert_array_equal(step(batch).numpy(), expected[start : start + length])
                start += length
            engine.pool.release(blocks)


def test_batches_and_preemption_change_no_token(compiled: tuple[Path, Any]) -> None:
    params = llmc.SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    prompts = [TOKENS[index : index + length] for index, length in enumerate((1, 200, 30, 65, 16))]
    with llmc.load(compiled[0]) as engine:
        alone = [engine.generate(prompt, params).token_ids for prompt in prompts]
        assert [output.token_ids for output in engine.generate(prompts, params)] == alone
        block_bytes = engine.executor._program.kv_cache.bytes_per_block  # type: ignore[attr-defined]
    with llmc.load(compiled[0], kv_cache_bytes=17 * block_bytes) as tiny:
        outputs = tiny.generate(prompts, params)
        assert sum(output.stats.num_preemptions for output in outputs) > 0
        assert [output.token_ids for output in outputs] == alone


def test_memory_is_as_computed(checkpoint: Path, compiled: tuple[Path, Any]) -> None:
    path, report = compiled
    config = json.loads((checkpoint / "config.json").read_text())
    heads, dim = config["num_key_value_heads"], config["head_dim"]
    groups = -(-dim // 32)
    token_bytes = 2 * heads * (18 * groups + (dim + 4) + (dim + 4))
    slot_bytes = 3 * 4 * 16 * 2 * heads * dim * 2  # layers, blocks, tokens, keys and values, bfloat16
    target = report.targets["cpu-f32"]
    assert (target.kv_bytes_per_token, target.kv_bytes_per_slot) == (token_bytes, slot_bytes)
    fact = open_inspection(path).facts["target cpu-f32"]
    assert f"KV int4 x 1 + int8 x 1 + fp8 x 1 ({token_bytes} B/token and {slot_bytes} B/sequence in 16 bit)" in fact
