"""check_supported names field, value and what is supported; check_tensors counts what does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
from llmc.compiler.checkpoint import ARCHITECTURES, check_supported
from llmc.compiler.checkpoint.architectures import build_config, check_tensors, expected_shapes
from llmc.errors import CheckpointError, LlmcError, UnsupportedModelError

WHERE = Path("config.json")
LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_every_architecture_in_the_table_builds(model_type: str, tiny) -> None:
    model = tiny.make_model(model_type)
    check_supported(model.config)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert expected_shapes(model.config) == shapes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mixtral"}, ["model_type 'mixtral'", "llama, mistral, qwen2"]),
        ({"model_type": None}, ["model_type is None"]),
        ({"hidden_act": "gelu"}, ["hidden_act 'gelu'", "supported: silu"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["rope_type 'yarn'", "default, linear, llama3"]),
        ({"quantization_config": {"quant_method": "awq"}}, ["quantization_config", "'awq'", "remove the entry"]),
        ({"num_experts": 8}, ["num_experts=8", "mixture of experts"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads=4", "num_key_value_heads=3"]),
        ({"num_hidden_layers": 10**9}, ["num_hidden_layers is 1000000000", "from 1 to"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers is 0"]),
        ({"hidden_size": "64"}, ["hidden_size is '64'"]),
        ({"pad_token_id": 64}, ["pad_token_id is 64", "vocab_size=64"]),
        ({"hidden_size": 33}, ["hidden size (33)"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor=0.5", "phi3"]),
        ({"rms_norm_eps": "small"}, ["refuses the llama config"]),
    ],
)
def test_unsupported_config_is_one_line(changes: dict[str, object], words: list[str]) -> None:
    with pytest.raises(LlmcError) as caught:
        build_config({**LLAMA, **changes}, WHERE)
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"hidden_activation": "silu"}, "hidden_activation 'silu'"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_parameters.full_attention.rope_type"),
    ],
)
def test_unsupported_gemma(changes: dict[str, object], word: str) -> None:
    with pytest.raises(UnsupportedModelError, match=word):
        build_config({"model_type": "gemma3_text", "num_hidden_layers": 2, **changes}, WHERE)


def test_phi3_longrope_is_refused() -> None:
    factors = [1.0] * 48
    scaling = {"type": "longrope", "short_factor": factors, "long_factor": factors}
    with pytest.raises(UnsupportedModelError, match=r"rope_type 'longrope' is not supported; supported: default"):
        build_config({"model_type": "phi3", "num_hidden_layers": 2, "rope_scaling": scaling}, WHERE)


def test_llama3_rope_scaling_is_kept() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = build_config({**LLAMA, "rope_theta": 5e5, "rope_scaling": scaling}, WHERE)
    assert config.rope_parameters == {**scaling, "rope_theta": 5e5}


def test_null_sliding_window_stays_null() -> None:
    assert build_config({**LLAMA, "model_type": "mistral", "sliding_window": None}, WHERE).sliding_window is None
    assert build_config({**LLAMA, "model_type": "mistral", "sliding_window": 16}, WHERE).sliding_window == 16


def test_multimodal_gemma_takes_the_text_part() -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 3, "sliding_window": 1024}
    config = build_config(
        {"model_type": "gemma3", "eos_token_id": [1, 106], "text_config": text, "vision_config": {"x": 1}}, WHERE
    )
    assert (config.model_type, config.hidden_size, config.eos_token_id) == ("gemma3_text", 64, [1, 106])


def test_check_tensors_lists_every_kind_of_problem() -> None:
    config = build_config(LLAMA, WHERE)
    found = expected_shapes(config)
    assert check_tensors("m", config, found) == frozenset(found)
    del found["model.norm.weight"]
    found["lm_head.weight"] = (1, 2)
    found["model.layers.0.self_attn.q_proj.bias"] = (32,)
    with pytest.raises(CheckpointError) as caught:
        check_tensors("m", config, found)
    text = str(caught.value)
    assert "1 absent (model.norm.weight)" in text
    assert "lm_head.weight is [1, 2], expected [64, 32]" in text
    assert "1 unknown to llama (model.layers.0.self_attn.q_proj.bias)" in text


def test_layers_past_the_config_need_permission() -> None:
    config = build_config(LLAMA, WHERE)
    found = {**expected_shapes(config), "model.layers.2.mlp.up_proj.weight": (48, 32)}
    with pytest.raises(CheckpointError, match="unknown"):
        check_tensors("m", config, found)
    assert "model.layers.2.mlp.up_proj.weight" not in check_tensors("m", config, found, allow_extra_layers=True)
