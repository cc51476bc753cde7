"""Tiny models of every architecture, with random weights large enough that a wrong operator shows in the logits."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton; kernels are compiled in processes of their own

_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 301,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "num_key_value_heads": 2, "rope_parameters": _LLAMA3_ROPE},
    "qwen2": {"model_type": "qwen2", "num_key_value_heads": 2},
    "qwen3": {"model_type": "qwen3", "num_key_value_heads": 1, "head_dim": 20},
    "mistral": {"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": 37},
    "gemma3": {
        "model_type": "gemma3_text",
        "hidden_size": 72,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "query_pre_attn_scalar": 24,
        "sliding_window": 37,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "tie_word_embeddings": True,
    },
    "phi3": {"model_type": "phi3", "num_key_value_heads": 2, "partial_rotary_factor": 0.5},
}
ARCHITECTURES = tuple(_ARCHITECTURES)


def pytest_configure(config: pytest.Config) -> None:
    """Workers that share the machine take one thread each: threads that wait for each other at barriers must not outnumber the cores."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ["OMP_NUM_THREADS"] = "1"  # torch, in this process and those it starts
        os.environ.setdefault("LLMC_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow files first, so that no worker is left with one of them at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with an `architecture` argument runs for each of them."""
    if "architecture" in metafunc.fixturenames:
        metafunc.parametrize("architecture", ARCHITECTURES)


@pytest.fixture(scope="session")
def tiny_config() -> Callable[..., Any]:
    """`tiny_config("llama", num_hidden_layers=1)` -> a transformers config."""
    from transformers import AutoConfig

    def make(architecture: str, **overrides: Any) -> Any:
        return AutoConfig.for_model(**_COMMON | _ARCHITECTURES[architecture] | overrides)

    return make


@pytest.fixture(scope="session")
def tiny_model(tiny_config: Callable[..., Any]) -> Callable[..., Any]:
    """`tiny_model("llama")` -> the HF model in float32 with seeded weights; norms vary around one, biases are not zero."""
    import torch
    from transformers import AutoModelForCausalLM

    def make(architecture: str, **overrides: Any) -> Any:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(tiny_config(architecture, **overrides), dtype=torch.float32).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                spread = 0.2 if parameter.dim() == 1 else 1.5 / parameter.shape[-1] ** 0.5
                centre = 1.0 if "norm" in name and architecture != "gemma3" else 0.0
                parameter.copy_(centre + spread * torch.randn(parameter.shape))
        return model

    return make


@pytest.fixture(scope="session")
def tiny_checkpoint(tiny_model: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_checkpoint("llama")` -> a folder that holds `tiny_model("llama")`; made once for each set of arguments."""
    made: dict[str, Path] = {}

    def make(architecture: str, **overrides: Any) -> Path:
        key = f"{architecture}{sorted(overrides.items())}"
        if key not in made:
            made[key] = tmp_path_factory.mktemp(architecture) / architecture
            tiny_model(architecture, **overrides).save_pretrained(made[key])
            _write_byte_tokenizer(made[key])
        return made[key]

    return make


def _write_byte_tokenizer(folder: Path) -> None:
    """A tokenizer whose tokens are three special ones and the 256 bytes."""
    import json

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    special = ["<pad>", "<s>", "</s>"]
    vocabulary = {token: i for i, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
