"""The metadata of a GGUF file: architecture keys from the config, or everything from the GGUF file the model came from."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ...errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    from gguf import GGUFReader, GGUFWriter
    from transformers import PretrainedConfig

ARCHITECTURES: Final = {  # transformers model_type -> general.architecture
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
}
ROPE_FACTORS: Final = "rope_freqs.weight"

_GEMMA3_27B_LAYERS: Final = 62  # llama.cpp tells the 27B model, whose attention scale differs, by its layer count
_OWN: Final = ("general.architecture", "general.file_type", "general.quantization_version", "general.alignment")
_NOT_COPIED: Final = (*_OWN, "split.", "quantize.", "GGUF.")


def architecture(config: PretrainedConfig) -> str:
    """`general.architecture`; raises `UnsupportedModelError` for a model that GGUF export does not know."""
    if config.model_type not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"export: model_type {config.model_type!r} has no GGUF form here; supported: {', '.join(ARCHITECTURES)}; "
            "export it as compressed-tensors"
        )
    return ARCHITECTURES[config.model_type]


def copy_metadata(source: Path, writer: GGUFWriter) -> GGUFReader:
    """Everything but what describes the stored types, as it is in `source`; also its tokenizer. Returns the open file."""
    from gguf import GGUFReader, GGUFValueType

    reader = GGUFReader(source)
    for key, field in reader.fields.items():
        if key.startswith(_NOT_COPIED):
            continue
        is_array = field.types[0] == GGUFValueType.ARRAY
        value = field.contents()
        if is_array and not value:  # the container package writes no empty arrays
            continue
        writer.add_key_value(key, value, field.types[0], field.types[-1] if is_array else None)
    return reader


def add_architecture_keys(writer: GGUFWriter, config: PretrainedConfig, name: str) -> list[str]:
    """Sizes, norms, attention and rope of `config`; returns remarks on what the file cannot say.

    Raises `UnsupportedModelError` where llama.cpp would compute something else than the config means.
    """
    arch = writer.arch
    heads, hidden = config.num_attention_heads, config.hidden_size
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    writer.add_type("model")
    writer.add_name(name)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(hidden)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    remarks: list[str] = []
    if arch == "gemma3":
        _add_gemma3(writer, config, head_dim)
    else:
        writer.add_rope_dimension_count(head_dim)
        _add_rope(writer, config.rope_parameters or {})
        remarks += _check_window(writer, config)
    return remarks


def rope_factors(config: PretrainedConfig) -> np.ndarray | None:
    """The divisors of the rotary frequencies, float32 `[head_dim / 2]`, with which llama.cpp expresses Llama 3's rope scaling."""
    rope: dict[str, Any] = config.rope_parameters or {}
    if rope.get("rope_type") != "llama3":
        return None
    if ARCHITECTURES[config.model_type] != "llama":
        raise UnsupportedModelError(
            f"export: rope_type 'llama3' in a {config.model_type} model has no GGUF form; llama.cpp reads {ROPE_FACTORS} of llama alone"
        )
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    factor, low, high = (float(rope[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    context = float(rope["original_max_position_embeddings"])
    wavelength = 2 * math.pi * float(rope["rope_theta"]) ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((context / wavelength - low) / (high - low), 0, 1)
    return np.asarray(1 / ((1 - smooth) / factor + smooth), np.float32)


def _add_rope(writer: GGUFWriter, rope: dict[str, Any]) -> None:
    from gguf import RopeScalingType

    writer.add_rope_freq_base(float(rope.get("rope_theta", 10_000.0)))
    if rope.get("rope_type") == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(rope["factor"]))


def _check_window(writer: GGUFWriter, config: PretrainedConfig) -> list[str]:
    window = getattr(config, "sliding_window", None)
    types = set(getattr(config, "layer_types", None) or ())
    if window is None or (types and "sliding_attention" not in types):
        return []
    if config.model_type != "mistral":
        raise UnsupportedModelError(f"export: sliding_window={window} in a {config.model_type} model has no GGUF form")
    writer.add_sliding_window(window)
    return [f"llama.cpp attends to the whole context where the model attends to its last {window} tokens"]


def _add_gemma3(writer: GGUFWriter, config: PretrainedConfig, head_dim: int) -> None:
    layers = config.num_hidden_layers
    scalar = config.hidden_size // config.num_attention_heads if layers == _GEMMA3_27B_LAYERS else head_dim
    if config.query_pre_attn_scalar != scalar:
        raise UnsupportedModelError(
            f"export: query_pre_attn_scalar={config.query_pre_attn_scalar} has no GGUF form; llama.cpp takes {scalar} for this model"
        )
    writer.add_sliding_window(config.sliding_window)
    period = _period(list(config.layer_types))
    if period != 6:  # the period that every reader assumes
        writer.add_uint32("gemma3.attention.sliding_window_pattern", period)
    full, local = (config.rope_parameters[kind] for kind in ("full_attention", "sliding_attention"))
    if local.get("rope_type", "default") != "default":
        raise UnsupportedModelError("export: rope scaling of sliding layers has no GGUF form")
    _add_rope(writer, full)
    if float(local["rope_theta"]) != 10_000.0:
        writer.add_float32("gemma3.rope.freq_base_swa", float(local["rope_theta"]))


def _period(layer_types: list[str]) -> int:
    """After how many layers one attends to the whole context, the last of each period."""
    full = [index for index, kind in enumerate(layer_types) if kind == "full_attention"]
    period = 6 if not full and len(layer_types) < 6 else full[0] + 1 if full else len(layer_types) + 1
    expected = [index for index in range(len(layer_types)) if index % period == period - 1]
    if full != expected:
        raise UnsupportedModelError(
            f"export: full attention in layers {full[:8]} has no GGUF form; expected every n-th layer, the last of each n"
        )
    return period


def require_tokenizer(has_tokenizer: bool, name: str) -> None:
    """Raises `CheckpointError` for a model without one: llama.cpp loads no such file."""
    if not has_tokenizer:
        raise CheckpointError(
            f"export: {name} has no tokenizer, and llama.cpp loads no GGUF without one; add tokenizer.json to the model"
        )
