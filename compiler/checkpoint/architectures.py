"""The table of architectures that llmc compiles, and the checks that a config and its tensors fit it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import CheckpointError, UnsupportedModelError
from .base import one_line, printable

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One supported `model_type` and the values of its config fields that the compiler handles."""

    causal_lm: str  # transformers class
    activations: tuple[str, ...] = ("silu",)
    rope_types: tuple[str, ...] = ROPE_TYPES
    unit_offset_norm: bool = False  # RMSNorm multiplies by (1 + weight), so a neutral weight is 0


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(causal_lm="LlamaForCausalLM"),
    "mistral": Architecture(causal_lm="MistralForCausalLM"),
    "qwen2": Architecture(causal_lm="Qwen2ForCausalLM"),
    "qwen3": Architecture(causal_lm="Qwen3ForCausalLM"),
    "phi3": Architecture(causal_lm="Phi3ForCausalLM", rope_types=("default",)),
    "gemma3_text": Architecture(
        causal_lm="Gemma3ForCausalLM",
        activations=("gelu_pytorch_tanh",),
        rope_types=("default", "linear"),
        unit_offset_norm=True,
    ),
}

_SIZES = {  # field -> largest sane value: a damaged config must not cost hours or all memory
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "num_hidden_layers": 1 << 10,
    "num_attention_heads": 1 << 12,
    "num_key_value_heads": 1 << 12,
    "max_position_embeddings": 1 << 30,
}
_MUST_BE_OFF = (  # field, what it turns on
    ("attn_logit_softcapping", "attention softcapping"),
    ("final_logit_softcapping", "logit softcapping"),
    ("use_bidirectional_attention", "bidirectional attention"),
    ("num_experts", "mixture of experts"),
    ("num_local_experts", "mixture of experts"),
)
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def build_config(values: Mapping[str, object], where: Path) -> PretrainedConfig:
    """The text causal LM's transformers config for the contents of a config.json, checked with `check_supported`."""
    from transformers import CONFIG_MAPPING

    text = values.get("text_config")
    if isinstance(text, dict) and values.get("model_type") == "gemma3":  # multimodal Gemma 3: take the text part
        outer = ("dtype", "torch_dtype", "eos_token_id", "quantization_config", "tie_word_embeddings")
        values = {"model_type": "gemma3_text", **{key: values[key] for key in outer if key in values}, **text}
    model_type = values.get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError(f"{where}: model_type is {model_type!r}; expected one of {', '.join(ARCHITECTURES)}")
    if model_type not in ARCHITECTURES:
        raise _unsupported("model_type", model_type, ARCHITECTURES)
    _check_sizes({field: values[field] for field in _SIZES if values.get(field) is not None})
    try:
        config = CONFIG_MAPPING[model_type].from_dict(dict(values))
    except Exception as error:  # transformers validates with many exception types of its own
        raise CheckpointError(f"{where}: transformers refuses the {model_type} config: {one_line(error)}") from error
    check_supported(config)
    return config


def check_supported(config: PretrainedConfig) -> None:
    """Raise `UnsupportedModelError`, naming field, value and what is supported, unless llmc compiles this config."""
    architecture = ARCHITECTURES.get(config.model_type)
    if architecture is None:
        raise _unsupported("model_type", config.model_type, ARCHITECTURES)
    if (quantization := getattr(config, "quantization_config", None)) is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise UnsupportedModelError(
            f"config: quantization_config says {method!r}, which only a folder with its quantised weights can follow: "
            "remove the entry from this config"
        )
    _check_finite(config.to_dict(), "config")
    _check_sizes({field: getattr(config, field, None) for field in _SIZES})
    window = getattr(config, "sliding_window", None)
    if window is not None and window < 1:
        raise CheckpointError(f"config: sliding_window is {window}, expected at least 1, or null for none")
    if not config.rms_norm_eps >= 0:
        raise CheckpointError(f"config: rms_norm_eps is {config.rms_norm_eps}, expected 0 or more")
    if config.num_attention_heads % config.num_key_value_heads:
        raise UnsupportedModelError(
            f"config: num_attention_heads={config.num_attention_heads} is not a multiple of "
            f"num_key_value_heads={config.num_key_value_heads}"
        )
    if getattr(config, "head_dim", None) is None and config.hidden_size % config.num_attention_heads:
        raise UnsupportedModelError(
            f"config: hidden_size={config.hidden_size} is not a multiple of "
            f"num_attention_heads={config.num_attention_heads}, and head_dim is not given"
        )
    padding = getattr(config, "pad_token_id", None)
    if padding is not None and not -config.vocab_size <= padding < config.vocab_size:
        raise CheckpointError(f"config: pad_token_id is {padding}, expected less than vocab_size={config.vocab_size}")
    activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    if activation not in architecture.activations:
        field = "hidden_activation" if config.model_type == "gemma3_text" else "hidden_act"
        raise _unsupported(field, activation, architecture.activations)
    for field, meaning in _MUST_BE_OFF:
        if value := getattr(config, field, None):
            raise UnsupportedModelError(f"config: {field}={value!r} ({meaning}) is not supported; expected it unset")
    for layer_type in getattr(config, "layer_types", None) or ():
        if layer_type not in ("full_attention", "sliding_attention"):
            raise _unsupported("layer_types", layer_type, ("full_attention", "sliding_attention"))
    _check_rope(config, architecture)


def _check_finite(value: object, where: str) -> None:
    """Refuse NaN and infinity anywhere in the config: no reader of JSON accepts them, and no model means them."""
    if isinstance(value, float) and not math.isfinite(value):
        raise CheckpointError(f"{where} is {value}, expected a finite number")
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        _check_finite(item, f"{where}.{key}")


def _check_sizes(values: Mapping[str, object]) -> None:
    for field, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _SIZES[field]:
            raise UnsupportedModelError(f"config: {field} is {value!r}; expected an integer from 1 to {_SIZES[field]}")


def _check_rope(config: PretrainedConfig, architecture: Architecture) -> None:
    rope = config.rope_parameters or {}
    nested = {key: value for key, value in rope.items() if isinstance(value, dict)}  # per layer type
    for key, parameters in nested.items() or [("", rope)]:
        field = f"rope_parameters.{key}.rope_type" if key else "rope_parameters.rope_type"
        rope_type = parameters.get("rope_type", "default")
        if rope_type not in architecture.rope_types:
            raise _unsupported(field, rope_type, architecture.rope_types)
        partial = parameters.get("partial_rotary_factor", 1.0)
        if partial != 1.0 and config.model_type != "phi3":
            raise UnsupportedModelError(f"config: partial_rotary_factor={partial}; only phi3 models may set it")


def expected_shapes(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter of the causal LM; a tied `lm_head.weight` is left out.

    Builds the transformers model on the `meta` device, so it takes no memory for weights. Raises `CheckpointError` if
    the config's sizes contradict each other.
    """
    import torch
    import transformers

    causal_lm = getattr(transformers, ARCHITECTURES[config.model_type].causal_lm)
    try:
        with torch.device("meta"):
            model = causal_lm(config)
        model.tie_weights()
    except Exception as error:  # sizes that contradict each other surface as any exception of torch's
        raise CheckpointError(f"config: transformers cannot build this model: {one_line(error)}") from error
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def check_tensors(
    source: str,
    config: PretrainedConfig,
    found: Mapping[str, tuple[int, ...]],
    *,
    expected: Mapping[str, tuple[int, ...]] | None = None,
    allow_extra_layers: bool = False,
) -> frozenset[str]:
    """Compare stored tensors with the architecture's; return the names the model uses.

    Raises one `CheckpointError` that counts and shows what is absent, misshapen or unknown. A stored tied lm_head is
    kept. Layers past `num_hidden_layers` are unknown unless `allow_extra_layers`. `expected` is `expected_shapes(config)`, where
    the caller has it.
    """
    expected = expected_shapes(config) if expected is None else expected
    used = {**expected}
    if "lm_head.weight" not in expected and "lm_head.weight" in found:
        used["lm_head.weight"] = expected["model.embed_tokens.weight"]
    problems: list[str] = []
    absent = [name for name in used if name not in found]
    if absent:
        problems.append(f"{len(absent)} absent ({_examples(absent)})")
    misshapen = [
        f"{name} is {list(found[name])}, expected {list(shape)}"
        for name, shape in used.items()
        if name in found and found[name] != shape
    ]
    if misshapen:
        problems.append(f"{len(misshapen)} of a wrong shape ({_examples(misshapen)})")
    unknown = [name for name in found if name not in used and not _ignored(name, config, allow_extra_layers)]
    if unknown:
        problems.append(f"{len(unknown)} unknown to {config.model_type} ({_examples(unknown)})")
    if problems:
        raise CheckpointError(
            f"{source}: tensors do not fit the config: {'; '.join(problems)}; "
            "expected weights and config of one model: download both again"
        )
    return frozenset(used)


def _ignored(name: str, config: PretrainedConfig, allow_extra_layers: bool) -> bool:
    if name.endswith("rotary_emb.inv_freq"):  # a buffer that old checkpoints stored; recomputed from the config
        return True
    layer = _LAYER.match(name)
    return allow_extra_layers and layer is not None and int(layer.group(1)) >= config.num_hidden_layers


def _examples(items: list[str]) -> str:
    shown = [printable(item) for item in items[:3]]  # names come from the file
    return ", ".join(shown) + (", ..." if len(items) > 3 else "")


def _unsupported(field: str, found: object, supported: Iterable[str]) -> UnsupportedModelError:
    return UnsupportedModelError(f"config: {field} {found!r} is not supported; supported: {', '.join(supported)}")
