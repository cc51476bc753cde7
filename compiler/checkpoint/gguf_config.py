"""Turns GGUF metadata into the config of the matching transformers causal LM."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...errors import CheckpointError, UnsupportedModelError
from .architectures import build_config
from .gguf_reader import GgufReader

if TYPE_CHECKING:
    from transformers import PretrainedConfig

GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")

_ROPE_FACTORS = "rope_freqs.weight"
_GEMMA3_27B_LAYERS = 62  # llama.cpp recognises the 27B model, whose attention scale differs, by its layer count


class _Keys:
    """Typed access to `<architecture>.<name>` metadata; a missing or mistyped key is one sentence."""

    def __init__(self, reader: GgufReader, architecture: str) -> None:
        self._reader = reader
        self._architecture = architecture

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._get(name, default)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():  # one per layer
            value = value[0].item()
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._wrong(name, value, "one integer for all layers")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._wrong(name, value, "a number")
        return float(str(np.float32(value)))  # the decimal that was written, not its float32 neighbour

    def text(self, name: str, default: str) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, value, "a string")
        return value

    def has(self, name: str) -> bool:
        return f"{self._architecture}.{name}" in self._reader.metadata

    def _get(self, name: str, default: object) -> object:
        value = self._reader.metadata.get(f"{self._architecture}.{name}", default)
        if value is None:
            raise CheckpointError(
                f"{self._reader.path}: metadata has no {self._architecture}.{name}; convert the model to GGUF again"
            )
        return value

    def _wrong(self, name: str, value: object, expected: str) -> CheckpointError:
        shown = f"an array of {value.size}" if isinstance(value, np.ndarray) else repr(value)[:60]
        return CheckpointError(f"{self._reader.path}: metadata {self._architecture}.{name} is {shown}, expected {expected}")


def architecture_of(reader: GgufReader) -> str:
    """The file's `general.architecture`, one of `GGUF_ARCHITECTURES`."""
    architecture = reader.metadata.get("general.architecture")
    if architecture not in GGUF_ARCHITECTURES:
        raise UnsupportedModelError(
            f"{reader.path}: general.architecture {architecture!r} is not supported; supported: {', '.join(GGUF_ARCHITECTURES)}"
        )
    count = reader.metadata.get("split.count", 1)
    if isinstance(count, int) and count > 1:
        raise UnsupportedModelError(
            f"{reader.path}: one of {count} parts of a split GGUF; join them with llama-gguf-split --merge"
        )
    return str(architecture)


def gguf_config(reader: GgufReader) -> PretrainedConfig:
    """The transformers config, checked with `check_supported`."""
    return build_config(gguf_config_values(reader), reader.path)


def gguf_config_values(reader: GgufReader) -> dict[str, object]:
    """The contents that config.json would have."""
    architecture = architecture_of(reader)
    keys = _Keys(reader, architecture)
    if (heads := keys.integer("attention.head_count")) < 1:
        raise CheckpointError(f"{reader.path}: metadata attention.head_count is {heads}, expected 1 or more")
    hidden = keys.integer("embedding_length")
    if keys.integer("expert_count", 0):
        raise UnsupportedModelError(f"{reader.path}: mixtures of experts are not supported (expert_count > 0)")
    embedding = reader.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{reader.path}: no matrix token_embd.weight; convert the model to GGUF again")
    head_dim = keys.integer("attention.key_length", hidden // heads)
    if keys.integer("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError(f"{reader.path}: keys and values of different lengths are not supported")
    if (rotary := keys.integer("rope.dimension_count", head_dim)) != head_dim:
        raise UnsupportedModelError(
            f"{reader.path}: rotary embedding of {rotary} of {head_dim} dimensions is not supported here"
        )
    values: dict[str, object] = {
        "model_type": architecture,
        "vocab_size": embedding.shape[0],  # the matrix may be padded past the token list
        "hidden_size": hidden,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in reader.tensors,
        "bos_token_id": _special_id(reader, "bos"),
        "eos_token_id": _special_id(reader, "eos"),
        "pad_token_id": _special_id(reader, "padding"),
    }
    if architecture == "gemma3":
        return values | _gemma3_values(keys, values)
    values["rope_parameters"] = _rope(keys, reader, head_dim)
    if architecture in ("llama", "qwen3"):
        values["attention_bias"] = "blk.0.attn_q.bias" in reader.tensors
    if architecture == "llama":
        values["mlp_bias"] = "blk.0.ffn_up.bias" in reader.tensors
        window = keys.integer("attention.sliding_window", 0)
        if 0 < window < keys.integer("context_length"):  # Mistral is stored as llama
            values |= {"model_type": "mistral", "sliding_window": window}
    if architecture == "qwen2" and head_dim * heads != hidden:
        raise UnsupportedModelError(f"{reader.path}: qwen2 with head_dim {head_dim} x {heads} heads != {hidden}")
    return values


def _gemma3_values(keys: _Keys, values: Mapping[str, object]) -> dict[str, object]:
    layers, hidden, heads = (keys.integer(k) for k in ("block_count", "embedding_length", "attention.head_count"))
    full: dict[str, object] = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base", 1_000_000.0)}
    if (kind := keys.text("rope.scaling.type", "none")) != "none":
        full |= {"rope_type": kind, "factor": keys.number("rope.scaling.factor")}
    local = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", 10_000.0)}
    optional: dict[str, object] = {
        name: keys.number(name) for name in ("attn_logit_softcapping", "final_logit_softcapping") if keys.has(name)
    }
    if keys.has("attention.sliding_window_pattern"):  # transformers, too, makes every sixth layer full by default
        optional["sliding_window_pattern"] = keys.integer("attention.sliding_window_pattern")
    return {
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": hidden // heads if layers == _GEMMA3_27B_LAYERS else values["head_dim"],
        "sliding_window": keys.integer("attention.sliding_window"),
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
        **optional,
    }


def _rope(keys: _Keys, reader: GgufReader, head_dim: int) -> dict[str, object]:
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base", 10_000.0)}
    kind = keys.text("rope.scaling.type", "none")
    # Old files give a linear factor without naming the type.
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    if kind not in ("none", "linear"):
        raise UnsupportedModelError(f"{reader.path}: rope.scaling.type {kind!r} is not supported; supported: none, linear")
    if factor not in (0.0, 1.0) and (kind == "linear" or keys.has("rope.scale_linear")):
        rope |= {"rope_type": "linear", "factor": factor}
    if (tensor := reader.tensors.get(_ROPE_FACTORS)) is None:
        return rope
    if tensor.type_name != "F32" or tensor.shape != (head_dim // 2,):
        raise CheckpointError(
            f"{reader.path}: {_ROPE_FACTORS} is {tensor.type_name}{list(tensor.shape)}, expected F32[{head_dim // 2}]"
        )
    factors = reader.data(tensor).view(np.float32)
    if np.all(factors == 1.0):
        return rope
    return rope | _llama3_rope(reader.path, factors, float(rope["rope_theta"]), head_dim)  # type: ignore[arg-type]


def _llama3_rope(path: Path, factors: np.ndarray, theta: float, head_dim: int) -> dict[str, object]:
    """Recover the llama3 rope parameters from the per-frequency divisors that llama.cpp stores in their place.

    The largest divisor is the factor; Meta's releases share low 1, high 4. The context they extend is found by trying
    powers of two, and accepted only if it gives back every stored divisor.
    """
    factor = float(factors.max())
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = 1.0, 4.0
    for original in (8192, *(2**power for power in range(9, 18))):
        smooth = (original / wavelength - low) / (high - low)
        with np.errstate(all="ignore"):  # a hostile factor of 0 or NaN just fails to match
            blend = 1 / ((1 - smooth) / factor + smooth)
        rebuilt = np.where(wavelength < original / high, 1.0, np.where(wavelength > original / low, factor, blend))
        if np.allclose(rebuilt, factors, rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": round(factor, 4),
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise UnsupportedModelError(
        f"{path}: {_ROPE_FACTORS} does not follow the llama3 rope scaling (factor {factor:g}); supported: "
        "default, linear and llama3 with low_freq_factor 1 and high_freq_factor 4"
    )


def _special_id(reader: GgufReader, kind: str) -> int | None:
    value = reader.metadata.get(f"tokenizer.ggml.{kind}_token_id")
    return value if isinstance(value, int) and not isinstance(value, bool) else None
