"""GGUF metadata gives the config that the model's own config.json has."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.checkpoint.gguf_config import gguf_config_values
from llmc.compiler.checkpoint.gguf_reader import GgufReader
from llmc.errors import LlmcError, UnsupportedModelError


def llama3_factors(model: torch.nn.Module) -> np.ndarray:
    """What llama.cpp stores in rope_freqs.weight: unscaled over scaled frequency, taken from transformers itself."""
    config = model.config
    plain = config.rope_parameters["rope_theta"] ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
    return (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recovered_from_the_frequencies(factor: float, tiny, tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": 500000.0,
    }
    model = tiny.make_model("llama", head_dim=64, rope_parameters=scaling, max_position_embeddings=131072)
    file = tmp_path / "m.gguf"
    tiny.write_gguf(file, model, extra_tensors={"rope_freqs.weight": llama3_factors(model)})
    checkpoint = open_checkpoint(str(file))
    assert checkpoint.config.rope_parameters == scaling
    assert "rope_freqs.weight" not in checkpoint.tensor_names()
    assert torch.allclose(tiny.logits(tiny.reload(checkpoint)), tiny.logits(model), atol=1e-5)


def test_frequencies_of_another_kind_are_refused(tiny, tmp_path: Path) -> None:
    model, file = tiny.make_model("llama"), tmp_path / "m.gguf"
    tiny.write_gguf(file, model, extra_tensors={"rope_freqs.weight": np.linspace(1, 9, 8, dtype=np.float32)})
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight does not follow the llama3 rope scaling"):
        open_checkpoint(str(file))


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_senseless_frequencies(value: float, tiny, tmp_path: Path) -> None:
    model, file = tiny.make_model("llama"), tmp_path / "m.gguf"
    tiny.write_gguf(file, model, extra_tensors={"rope_freqs.weight": np.full(8, value, dtype=np.float32)})
    with pytest.raises(UnsupportedModelError):
        open_checkpoint(str(file))


def test_frequencies_of_one_mean_no_scaling(tiny, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    tiny.write_gguf(file, tiny.make_model("llama"), extra_tensors={"rope_freqs.weight": np.ones(8, dtype=np.float32)})
    assert open_checkpoint(str(file)).config.rope_parameters["rope_type"] == "default"


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, {"rope_type": "default", "rope_theta": 500000.0}),
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
            {"rope_type": "linear", "rope_theta": 500000.0, "factor": 4.0},
        ),
        ({"rope.scale_linear": 2.0}, {"rope_type": "linear", "rope_theta": 500000.0, "factor": 2.0}),
        ({"rope.freq_base": None}, {"rope_type": "default", "rope_theta": 10000.0}),
    ],
)
def test_rope(metadata: dict[str, object], expected: dict[str, object], tiny, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    tiny.write_gguf(file, tiny.make_model("llama"), metadata=metadata)
    assert open_checkpoint(str(file)).config.rope_parameters == expected


def test_gemma3_linear_scaling_touches_only_full_attention(tiny, tmp_path: Path) -> None:
    scaled = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    local = {"rope_type": "default", "rope_theta": 1e4}
    parameters = {"full_attention": scaled, "sliding_attention": local}
    model, file = tiny.make_model("gemma3_text", rope_parameters=parameters), tmp_path / "m.gguf"
    tiny.write_gguf(file, model, metadata={"rope.scaling.type": "linear", "rope.scaling.factor": 8.0})
    checkpoint = open_checkpoint(str(file))
    assert checkpoint.config.rope_parameters == parameters
    assert torch.allclose(tiny.logits(tiny.reload(checkpoint)), tiny.logits(model), atol=1e-5)


def test_gemma3_27b_scales_attention_by_hidden_size_over_heads(tiny, tmp_path: Path) -> None:
    model = tiny.make_model("gemma3_text", num_hidden_layers=62, intermediate_size=8, vocab_size=32)
    tiny.write_gguf(tmp_path / "m.gguf", model)
    config = open_checkpoint(str(tmp_path / "m.gguf")).config
    assert config.query_pre_attn_scalar == 64 // 4
    assert config.layer_types.count("full_attention") == 10


def test_gemma3_local_base_and_pattern_from_metadata(tiny, tmp_path: Path) -> None:
    metadata = {"rope.freq_base_swa": 20000.0, "attention.sliding_window_pattern": 2}
    tiny.write_gguf(tmp_path / "m.gguf", tiny.make_model("gemma3_text"), metadata=metadata)
    config = open_checkpoint(str(tmp_path / "m.gguf")).config
    assert config.rope_parameters["sliding_attention"]["rope_theta"] == 20000.0
    assert config.layer_types[:4] == ["sliding_attention", "full_attention"] * 2


def test_a_sliding_window_makes_llama_a_mistral(tiny, tmp_path: Path) -> None:
    model = tiny.make_model("mistral")
    tiny.write_gguf(tmp_path / "m.gguf", model)
    config = open_checkpoint(str(tmp_path / "m.gguf")).config
    assert (config.model_type, config.sliding_window) == ("mistral", 8)
    tiny.write_gguf(tmp_path / "n.gguf", model, metadata={"attention.sliding_window": 128})  # the whole context
    assert open_checkpoint(str(tmp_path / "n.gguf")).config.model_type == "llama"


def test_equal_counts_per_layer_are_one_count(tiny, tmp_path: Path) -> None:
    model = tiny.make_model("llama")
    tiny.write_gguf(tmp_path / "m.gguf", model, metadata={"attention.head_count_kv": [2, 2]})
    assert open_checkpoint(str(tmp_path / "m.gguf")).config.num_key_value_heads == 2


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"block_count": None}, "metadata has no llama.block_count"),
        ({"block_count": "two"}, "llama.block_count is 'two', expected one integer"),
        ({"block_count": 1 << 31}, "num_hidden_layers is 2147483648"),
        ({"attention.head_count_kv": [2, 1]}, "llama.attention.head_count_kv is an array of 2"),
        ({"attention.head_count": 0}, "attention.head_count is 0"),
        ({"attention.layer_norm_rms_epsilon": "x"}, "expected a number"),
        ({"expert_count": 8}, "mixtures of experts"),
        ({"rope.scaling.type": "yarn"}, "rope.scaling.type 'yarn' is not supported; supported: none, linear"),
        ({"rope.scaling.type": 3}, "expected a string"),
        ({"rope.dimension_count": 8}, "rotary embedding of 8 of 16 dimensions"),
        ({"attention.value_length": 8}, "different lengths"),
        ({"feed_forward_length": 95}, "mlp.gate_proj.weight is [96, 64], expected [95, 64]"),
        ({"embedding_length": 1 << 30}, "hidden_size is 1073741824"),
    ],
)
def test_bad_metadata_is_one_sentence(metadata: dict[str, object], words: str, tiny, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    tiny.write_gguf(file, tiny.make_model("llama"), metadata=metadata)
    with pytest.raises(LlmcError) as caught:
        open_checkpoint(str(file))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_architecture_and_split_files(tiny, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    tiny.write_gguf(file, tiny.make_model("llama"))
    data = file.read_bytes()
    file.write_bytes(data.replace(b"llama", b"lemma"))
    with pytest.raises(UnsupportedModelError, match=r"'lemma' is not supported; supported: llama, qwen2, qwen3"):
        open_checkpoint(str(file))
    file.write_bytes(data)
    reader = GgufReader(file)
    reader.metadata["split.count"] = 3
    with pytest.raises(UnsupportedModelError, match="one of 3 parts"):
        gguf_config_values(reader)


@pytest.mark.gemma
def test_gemma3_270m_has_its_published_hyperparameters(gemma_gguf: Path) -> None:
    config = open_checkpoint(str(gemma_gguf)).config.to_dict()
    published = {
        "model_type": "gemma3_text",
        "vocab_size": 262144,
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "max_position_embeddings": 32768,
        "sliding_window": 512,
        "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }
    assert {key: config[key] for key in published} == published


# transformers reads neither qwen3's key_length nor derives Gemma's scale, so these sizes are its classes' defaults.
@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [("llama", {}), ("qwen2", {}), ("qwen3", {"head_dim": 128}), ("gemma3_text", {"head_dim": 256})],
)
def test_config_equals_transformers_own_conversion(model_type: str, sizes: dict[str, int], tiny, tmp_path: Path) -> None:
    tiny.write_gguf(tmp_path / "m.gguf", tiny.make_model(model_type, **sizes))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path, gguf_file="m.gguf").to_dict()
    ours = open_checkpoint(str(tmp_path / "m.gguf")).config.to_dict()
    assert ours["rms_norm_eps"] == pytest.approx(theirs["rms_norm_eps"], rel=1e-6)
    theirs["rms_norm_eps"] = ours["rms_norm_eps"]
    for key in ("_name_or_path", "_model_name_or_path", "unk_token_id", "architectures"):  # facts about the file
        theirs.pop(key, None)
    assert {key: ours.get(key) for key in theirs} == theirs
