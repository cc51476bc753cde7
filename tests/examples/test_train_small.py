"""The training example: what it writes is a model that llmc compiles, runs and calibrates; the same again for the same steps."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType

import llmc
import numpy as np
import pytest
import torch
from llmc.quantization.calibration import load_calibration
from llmc.quantization.calibration.builtin import builtin_texts

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_small", ROOT / "examples" / "train_small.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.CONTEXT = 64  # for speed
    return module


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 25 kB of English in some forty paragraphs."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(builtin_texts()["english_prose"] + "\n" + builtin_texts()["english_more"])
    return path


def run(example: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["train_small.py", *map(str, arguments)])
    example.main()


def test_it_writes_a_model_that_runs(
    example: ModuleType, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "small"
    run(example, monkeypatch, "--out", model, "--text", text, "--steps", 5, "--vocab-size", 400)
    printed = capsys.readouterr().out
    assert "step 5/5" in printed
    reached, unigram, uniform = (
        float(printed.split(before)[1].split()[0].rstrip(","))
        for before in ("held-out loss ", "unigram model's is ", "uniform one's ")
    )
    assert uniform == pytest.approx(math.log(400), abs=1e-3)
    assert unigram < reached < uniform  # five steps teach something, but not much
    whole = [paragraph.strip() for paragraph in text.read_text().split("\n\n")]
    held_out = (model / "heldout.txt").read_text().strip()
    assert "\n\n".join(whole).endswith(held_out)
    passages = [json.loads(line)["text"] for line in (model / "calibration.jsonl").read_text().splitlines()]
    assert passages
    assert not any(passage in held_out for passage in passages)

    bundle = tmp_path / "small.llmc"
    llmc.compile(model, target="cpu-f32", output=bundle, cpu_levels=("native",))
    with llmc.load(bundle) as engine:
        output = engine.generate("The ferry left", llmc.SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
        assert len(output.token_ids) == 4
        loaded = example.LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
        ids = engine.tokenizer.encode("The ferry left")
        with torch.no_grad():
            expected = loaded(torch.tensor([ids])).logits[0].numpy()
        np.testing.assert_allclose(engine.logits(ids), expected, atol=1e-3)
    calibration = load_calibration(model / "calibration.jsonl", model, vocab_size=400, num_samples=16, max_length=64)
    assert all(sample[0] == 1 and 1 not in sample[1:] for sample in calibration.samples)
    assert {warning.name for warning in calibration.warnings} <= {"few-samples", "truncated"}


def test_the_same_steps_give_the_same_weights(
    example: ModuleType, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run(example, monkeypatch, "--out", tmp_path / name, "--text", text, "--steps", 2, "--vocab-size", 300, "--seed", seed)
        weights.append((tmp_path / name / "model.safetensors").read_bytes())
    assert weights[0] == weights[1] != weights[2]


def test_the_time_is_kept(
    example: ModuleType, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(example, "TIMED_STEPS", 2)
    run(example, monkeypatch, "--out", tmp_path / "out", "--text", text, "--minutes", "0.02", "--vocab-size", 300)
    printed = capsys.readouterr().out
    steps = int(printed.split(" steps fit")[0].split()[-1])
    assert steps >= 5
    assert f"--steps {steps} repeats this run" in printed


def test_too_little_text_is_one_sentence(example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.txt").write_text("One.\n\nTwo.")
    with pytest.raises(SystemExit, match=r"^train_small.py: the text has 2 paragraphs"):
        run(example, monkeypatch, "--out", tmp_path / "out", "--text", tmp_path / "text.txt")
    assert not (tmp_path / "out").exists()
