"""Names, order and values of GGUF tensors translated to Hugging Face conventions, one tensor at a time."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from .gguf_reader import GgufReader, GgufTensor

if TYPE_CHECKING:
    import torch

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA3_LAYER = _LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_DERIVED = frozenset({"rope_freqs.weight"})  # expressed in the config instead
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_CHUNK_BYTES = 8 << 20


def hf_names(architecture: str, gguf_names: Iterable[str]) -> dict[str, str]:
    """HF parameter name -> GGUF tensor name; a tensor with no counterpart keeps its own name."""
    layer_names = _GEMMA3_LAYER if architecture == "gemma3" else _LAYER
    names: dict[str, str] = {}
    for gguf_name in gguf_names:
        if gguf_name in _DERIVED:
            continue
        stem, _, kind = gguf_name.rpartition(".")
        if (match := _BLOCK.fullmatch(gguf_name)) and match[2] in layer_names:
            name = f"model.layers.{int(match[1])}.{layer_names[match[2]]}.{match[3]}"
        else:
            name = f"{_TOP[stem]}.{kind}" if stem in _TOP else gguf_name
        names[name if name not in names else gguf_name] = gguf_name
    return names


def read_tensor(reader: GgufReader, tensor: GgufTensor) -> torch.Tensor:
    """The tensor's values in its row-major shape: F16 and BF16 keep their type, everything else becomes float32."""
    import torch

    data = reader.data(tensor)
    if tensor.type_name in ("F32", "F16", "BF16"):
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[tensor.type_name]
        return torch.from_numpy(data.copy()).view(dtype).reshape(tensor.shape)
    return torch.from_numpy(_dequantize(data, tensor).reshape(tensor.shape))


def _dequantize(data: np.ndarray, tensor: GgufTensor) -> np.ndarray:
    """Decode blocks of one tensor to float32[elements], a few megabytes at a time to bound scratch memory."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType[tensor.type_name]
    block_elements, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = data.reshape(-1, block_bytes)
    out = np.empty((len(blocks), block_elements), dtype=np.float32)
    step = max(1, _CHUNK_BYTES // block_bytes)
    for start in range(0, len(blocks), step):
        # One wide row: the package decodes rows in groups of 16, which is slow for rows of one block.
        chunk = blocks[start : start + step].reshape(1, -1)
        with np.errstate(all="ignore"):  # damaged scales may be infinite or NaN, which is not this module's to judge
            out[start : start + step] = dequantize(chunk, kind).reshape(-1, block_elements)
    return out


def to_hf_layout(name: str, tensor: torch.Tensor, *, architecture: str, heads: int, kv_heads: int) -> torch.Tensor:
    """Undo what llama.cpp's converter does to values: q/k rows of llama interleaved, Gemma norms stored as 1+w."""
    if architecture == "gemma3" and name.endswith("norm.weight"):
        return tensor.float() - 1.0
    if architecture == "llama" and ".self_attn.q_proj." in name:
        return _deinterleave(tensor, heads)
    if architecture == "llama" and ".self_attn.k_proj." in name:
        return _deinterleave(tensor, kv_heads)
    return tensor


def _deinterleave(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rotary pairs (2i, 2i+1) back to halves (i, i + d/2) within every head."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])  # [heads, head_dim / 2, 2, ...]
    return pairs.transpose(1, 2).reshape(rows.shape).contiguous()
