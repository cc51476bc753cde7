"""A config alone gives a whole, deterministic model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from llmc.compiler.checkpoint import ARCHITECTURES, open_config
from llmc.errors import CheckpointError, LlmcError


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_whole_and_deterministic(model_type: str, tiny, tmp_path: Path) -> None:
    model = tiny.make_model(model_type)
    model.config.save_pretrained(tmp_path)
    first, second = (open_config(tmp_path / "config.json") for _ in range(2))
    assert first.tensor_names() == {name for name, _ in model.named_parameters()}
    for name in first.tensor_names():
        tensor = first.tensor(name)
        assert torch.equal(tensor, second.tensor(name))
        assert tuple(tensor.shape) == first.shape(name) == tuple(model.get_parameter(name).shape)
    assert tiny.logits(tiny.reload(first)).isfinite().all()
    norm = first.tensor("model.norm.weight").mean()
    assert abs(norm - (0 if model_type == "gemma3_text" else 1)) < 0.2
    weight = first.tensor("model.embed_tokens.weight")
    assert abs(weight.std() / model.config.initializer_range - 1) < 0.1
    assert first.generation_config["eos_token_id"] == [2]


def test_dtype_follows_the_config(tiny, tmp_path: Path) -> None:
    config = tiny.make_model("llama").config.to_dict()
    (tmp_path / "small.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    checkpoint = open_config(tmp_path / "small.json")
    assert checkpoint.name == "small"
    assert checkpoint.dtype("model.norm.weight") == "BF16"
    assert checkpoint.tensor("model.norm.weight").dtype == torch.bfloat16


def test_no_tokenizer(tiny, tmp_path: Path) -> None:
    tiny.make_model("llama").config.save_pretrained(tmp_path)
    checkpoint = open_config(tmp_path / "config.json")
    assert not checkpoint.has_tokenizer
    with pytest.raises(CheckpointError, match="no tokenizer"):
        checkpoint.write_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match="no tensor named"):
        checkpoint.tensor("nonsense")


@pytest.mark.parametrize("text", ["{}", "nonsense", '{"model_type": "gpt2"}'])
def test_bad_config(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(LlmcError):
        open_config(tmp_path / "config.json")
