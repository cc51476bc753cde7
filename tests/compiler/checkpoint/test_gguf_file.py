"""HF model -> GGUF as llama.cpp writes it -> open_checkpoint -> HF model: the same logits."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from llmc.compiler.checkpoint import Checkpoint, open_checkpoint
from llmc.compiler.checkpoint.gguf_reader import GgufReader
from llmc.errors import CheckpointError

MODEL_TYPES = ["llama", "mistral", "qwen2", "qwen3", "gemma3_text"]


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize("stored", ["F32", "F16", "BF16", "Q8_0", "Q4_0"])
def test_round_trip(model_type: str, stored: str, tiny, tmp_path: Path) -> None:
    model = tiny.make_model(model_type)
    values = tiny.write_gguf(tmp_path / "m.gguf", model, types=lambda name: stored)
    checkpoint = open_checkpoint(str(tmp_path / "m.gguf"))
    assert isinstance(checkpoint, Checkpoint)
    assert checkpoint.name == "tiny"
    assert checkpoint.config.model_type == model_type
    assert checkpoint.tensor_names() == frozenset(values)
    assert checkpoint.dtype("model.layers.0.mlp.up_proj.weight") == stored
    if stored == "F32":
        assert torch.allclose(tiny.logits(tiny.reload(checkpoint)), tiny.logits(model), atol=1e-5)
    for name, expected in values.items():
        assert torch.equal(checkpoint.tensor(name).float(), torch.from_numpy(expected)), name


def test_llama_with_biases(tiny, tmp_path: Path) -> None:
    model = tiny.make_model("llama", attention_bias=True, mlp_bias=True)
    tiny.write_gguf(tmp_path / "m.gguf", model)
    checkpoint = open_checkpoint(str(tmp_path / "m.gguf"))
    assert checkpoint.config.attention_bias
    assert torch.allclose(tiny.logits(tiny.reload(checkpoint)), tiny.logits(model), atol=1e-5)


def test_tied_head_is_absent_and_an_untied_one_is_not(tiny, tmp_path: Path) -> None:
    for tied in (True, False):
        tiny.write_gguf(tmp_path / "m.gguf", tiny.make_model("llama", tie_word_embeddings=tied))
        checkpoint = open_checkpoint(str(tmp_path / "m.gguf"))
        assert checkpoint.config.tie_word_embeddings is tied
        assert ("lm_head.weight" in checkpoint.tensor_names()) is not tied


def test_generation_config(tiny, tmp_path: Path) -> None:
    tiny.write_gguf(tmp_path / "m.gguf", tiny.make_model("llama"))
    expected = {"eos_token_id": [2], "bos_token_id": 1, "pad_token_id": 0}
    assert open_checkpoint(str(tmp_path / "m.gguf")).generation_config == expected


def test_a_file_without_a_vocabulary_opens(tiny, tmp_path: Path) -> None:
    tiny.write_gguf(tmp_path / "m.gguf", tiny.make_model("llama"), vocabulary=None)
    checkpoint = open_checkpoint(str(tmp_path / "m.gguf"))
    assert not checkpoint.has_tokenizer
    with pytest.raises(CheckpointError, match=r"no tokenizer\.ggml\.tokens"):
        checkpoint.write_tokenizer(tmp_path)


def test_more_tokens_than_embedding_rows(tiny, tmp_path: Path) -> None:
    tiny.write_gguf(tmp_path / "m.gguf", tiny.make_model("llama", vocab_size=16))
    with pytest.raises(CheckpointError, match="24 tokens but 16 rows"):
        open_checkpoint(str(tmp_path / "m.gguf"))


def test_missing_and_surplus_tensors(tiny, tmp_path: Path) -> None:
    model, file = tiny.make_model("llama"), tmp_path / "m.gguf"
    tiny.write_gguf(file, model, metadata={"block_count": 3})
    with pytest.raises(CheckpointError, match=r"9 absent \(model\.layers\.2\."):
        open_checkpoint(str(file))
    tiny.write_gguf(file, model, metadata={"block_count": 1})
    with pytest.raises(CheckpointError, match="9 unknown to llama"):
        open_checkpoint(str(file))
    tiny.write_gguf(file, model, extra_tensors={"blk.0.ffn_gate_exps.weight": np.zeros((2, 32), np.float32)})
    with pytest.raises(CheckpointError, match=r"unknown to llama \(blk\.0\.ffn_gate_exps\.weight\)"):
        open_checkpoint(str(file))


def test_config_override(tiny, tmp_path: Path) -> None:
    tiny.write_gguf(tmp_path / "m.gguf", tiny.make_model("qwen2"))
    tiny.make_model("qwen2", num_hidden_layers=1).config.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(str(tmp_path / "m.gguf"), config_override=tmp_path / "config.json")
    assert checkpoint.config.num_hidden_layers == 1
    assert tiny.logits(tiny.reload(checkpoint)).isfinite().all()


@pytest.mark.gemma
def test_every_gemma_tensor_is_the_dequantised_one(gemma_gguf: Path) -> None:
    checkpoint = open_checkpoint(str(gemma_gguf))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, 18)
    reader = GgufReader(gemma_gguf)
    assert len(checkpoint.tensor_names()) == len(reader.tensors) == 236
    for name in checkpoint.tensor_names():
        tensor = reader.tensors[f"{names.get_name(name.removesuffix('.weight'))}.weight"]
        kind = gguf.GGMLQuantizationType[tensor.type_name]
        one_row = reader.data(tensor).reshape(1, -1)  # the package decodes few long rows faster than many short ones
        expected = gguf.quants.dequantize(one_row, kind).reshape(tensor.shape)
        assert checkpoint.dtype(name) == tensor.type_name
        assert torch.equal(checkpoint.tensor(name), torch.from_numpy(expected - (1 if "norm" in name else 0))), name


@pytest.mark.gemma
def test_gemma_continues_a_sentence(gemma_gguf: Path, tiny, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    checkpoint = open_checkpoint(str(gemma_gguf))
    assert checkpoint.generation_config == {"eos_token_id": [1, 106], "bos_token_id": 2, "pad_token_id": 0}
    checkpoint.write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = tokenizer.encode("The capital of France is").ids
    with torch.no_grad():
        found = tiny.reload(checkpoint)(torch.tensor([ids])).logits[0, -1].topk(5).indices.tolist()
    assert " Paris" in [tokenizer.decode([token_id]) for token_id in found]
