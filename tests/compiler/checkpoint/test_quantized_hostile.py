"""Random damage to configs and tensors of every quantised format costs one `LlmcError`, never another exception."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llmc.compiler.checkpoint.quantized import QuantizedFolder, take_format
from llmc.errors import LlmcError

NAME = "model.layers.0.mlp.up_proj"
N, K = 16, 64


def _words(*shape: int) -> torch.Tensor:
    return torch.full(shape, 0x77777777, dtype=torch.int32)


_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}
_SCALES = {"scales": torch.ones(2, N).half(), "qzeros": _words(2, N // 8)}
CASES: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor]]] = {
    "awq": ({"bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}, {"qweight": _words(K, N // 8), **_SCALES}),
    "gptq": (
        {"bits": 4, "group_size": 32, "desc_act": True, "sym": False, "checkpoint_format": "gptq", "dynamic": {"-:.*down": {}}},
        {"qweight": _words(K // 8, N), "g_idx": torch.arange(K, dtype=torch.int32) % 2, **_SCALES},
    ),
    "fp8": (
        {"weight_block_size": [8, 16], "ignored_layers": ["lm_head"]},
        {"weight": torch.ones(N, K).to(torch.float8_e4m3fn), "weight_scale_inv": torch.ones(2, 4)},
    ),
    "compressed-tensors": (
        {
            "format": "pack-quantized",
            "config_groups": {"a": {"targets": ["Linear", "re:.*up"], "weights": _INT4}},
            "ignore": ["x"],
        },
        {
            "weight_packed": _words(N, K // 8),
            "weight_scale": torch.ones(N, 2).bfloat16(),
            "weight_shape": torch.tensor([N, K]),
            "weight_zero_point": _words(N // 8, 2),
            "weight_g_idx": torch.arange(K, dtype=torch.int32) // 32,
        },
    ),
}
JUNK: tuple[Any, ...] = (None, True, -1, 0, 1, 3, 7, 8, 10**30, 0.5, "", "x", "re:(", [], [1], {}, {"a": []}, [None], "\x00")
TYPES = (torch.int8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float8_e4m3fn, torch.bool, torch.complex64)


class Memory:
    """Tensors in memory in place of a folder."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def stored_names(self) -> Mapping[str, str]:
        return {name: name for name in self.tensors}

    def stored_shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def stored_type(self, name: str) -> str:
        types = {"int8": "I8", "int32": "I32", "int64": "I64", "float16": "F16", "bfloat16": "BF16", "float32": "F32"}
        kind = str(self.tensors[name].dtype).removeprefix("torch.")
        return types.get(kind, "F8_E4M3" if kind == "float8_e4m3fn" else kind.upper())

    def stored_tensor(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def where(self, name: str) -> str:
        return f"file: tensor {name}"


def read(config: Mapping[str, Any], parts: Mapping[str, torch.Tensor]) -> str:
    """Everything that opening and reading does; the error, or "" where there was none."""
    try:
        format = take_format({"quantization_config": config}, Path("config.json"))
        if format is None:
            return ""
        source = Memory({f"{NAME}.{part}": tensor for part, tensor in parts.items()})
        folder = QuantizedFolder(format, source, {f"{NAME}.weight": (N, K)})
        folder.summary({f"{NAME}.weight": (N, K)}).lines()
        for weight in folder.weights.values():
            weight.matrix()
            assert weight.dequantize().shape == weight.shape
    except LlmcError as error:
        return str(error)
    return ""


def _replace(value: Any, rng: random.Random) -> Any:
    """The value with one entry, at any depth, replaced by junk or removed."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    if not keys or rng.random() < 0.2:
        return rng.choice(JUNK)
    key = rng.choice(list(keys))
    copy = value.copy()
    copy[key] = _replace(value[key], rng)
    if isinstance(copy, dict) and rng.random() < 0.1:
        del copy[key]
    return copy


def _damage(tensor: torch.Tensor, rng: random.Random) -> torch.Tensor:
    choice = rng.randrange(4)
    if choice == 0:
        return torch.zeros([rng.choice((0, 1, 2, 3, 16, 64)) for _ in range(rng.randrange(4))], dtype=tensor.dtype)
    if choice == 1:
        return torch.zeros(tensor.shape).to(rng.choice(TYPES))
    flat = tensor.clone().view(torch.uint8) if tensor.dim() else tensor.clone().reshape(1).view(torch.uint8)
    noise = np.random.default_rng(rng.randrange(1 << 30)).integers(0, 256, flat.shape, dtype=np.uint8)
    return torch.from_numpy(noise).view(tensor.dtype).reshape(tensor.shape)


@pytest.mark.parametrize("method", CASES)
def test_damage_never_escapes_as_another_error(method: str) -> None:
    config, parts = CASES[method]
    config = {"quant_method": method, **config}
    assert read(config, parts) == ""
    rng = random.Random(0)
    refused = 0
    for _ in range(300):
        damaged = _replace(config, rng) if rng.random() < 0.5 else config
        tensors = dict(parts)
        if damaged is config or rng.random() < 0.3:
            part = rng.choice(list(tensors))
            if rng.random() < 0.15:
                del tensors[part]
            else:
                tensors[part] = _damage(tensors[part], rng)
        error = read(damaged, tensors)
        assert "\n" not in error
        refused += bool(error)
    assert refused > 100
