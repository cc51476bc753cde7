"""FP8 folders: scales for the tensor, for rows and for blocks, under either name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llmc.compiler.checkpoint import open_checkpoint
from llmc.errors import LlmcError
from llmc.formats.floats import Fp8Matrix

DOWN = "model.layers.0.mlp.down_proj"


def e4m3(byte: int) -> float:
    """The value of a byte: sign, 4 bits of exponent with bias 7, 3 of mantissa."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    size = mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if byte & 128 else size


TABLE = np.array([e4m3(byte) for byte in range(256)], np.float32)
TABLE[[0x7F, 0xFF]] = np.nan


def nearest(w: np.ndarray) -> np.ndarray:
    """The bytes whose values lie nearest."""
    finite = np.flatnonzero(np.isfinite(TABLE))
    return finite[np.abs(w[..., None] - TABLE[finite]).argmin(-1)].astype(np.uint8)


@pytest.fixture(scope="module")
def write(quantized: Any, tiny_checkpoint: Callable[..., Path]) -> Callable[..., dict[str, np.ndarray]]:
    def make(
        path: Path,
        layout: str,
        *,
        name: str = "weight_scale",
        block: tuple[int, int] = (32, 32),
        dtype: torch.dtype = torch.float32,
        extra: bool = False,
        **config: Any,
    ) -> dict[str, np.ndarray]:
        def encode(module: str, w: np.ndarray) -> Any:
            if not quantized.in_layers(module):
                return None
            n, k = w.shape
            rows, columns = {"tensor": (n, k), "row": (1, k), "block": block}[layout]
            scale = np.empty((-(-n // rows), -(-k // columns)), np.float32)
            wide = np.empty_like(w)
            for i in range(scale.shape[0]):
                for j in range(scale.shape[1]):
                    part = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
                    scale[i, j] = torch.tensor(np.abs(w[part]).max() / 448).to(dtype).float() * 1.01
                    scale[i, j] = torch.tensor(scale[i, j]).to(dtype).float()
                    wide[part] = scale[i, j]
            bits = nearest(w / wide)
            stored = torch.from_numpy(scale).to(dtype)
            parts = {
                "weight": torch.from_numpy(bits).view(torch.float8_e4m3fn),
                name: stored.reshape(()) if layout == "tensor" else stored,
            }
            return (parts | {"input_scale": torch.tensor(0.5)} if extra else parts), TABLE[bits] * wide

        described = {"quant_method": "fp8", "activation_scheme": "dynamic", **config}
        return quantized.folder(tiny_checkpoint("llama"), path, described, encode)

    return make


@pytest.mark.parametrize(
    ("layout", "name", "dtype", "kept", "words"),
    [
        ("tensor", "weight_scale", torch.float32, True, "E4M3, one scale for the tensor: kept as fp8"),
        ("row", "weight_scale", torch.bfloat16, True, "E4M3, one scale a row: kept as fp8"),
        (
            "block",
            "weight_scale_inv",
            torch.float32,
            False,
            "E4M3, blocks of 32 x 32: converted (kernels have one scale a row)",
        ),
        ("block", "weight_scale_inv", torch.float8_e8m0fnu, False, "E4M3, blocks of 32 x 32: converted"),
    ],
)
def test_values_and_matrices(
    layout: str, name: str, dtype: torch.dtype, kept: bool, words: str, write: Any, tmp_path: Path
) -> None:
    values = write(tmp_path, layout, name=name, dtype=dtype, **({"weight_block_size": [32, 32]} if layout == "block" else {}))
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.tensor_names() == frozenset(values)
    for parameter, expected in values.items():
        assert np.array_equal(checkpoint.tensor(parameter).numpy(), expected), parameter
        matrix = checkpoint.stored_matrix(parameter)
        if kept and "proj" in parameter:
            assert isinstance(matrix, Fp8Matrix)
            assert matrix.shape == expected.shape
            assert np.array_equal(matrix.dequantize(), expected)
        else:
            assert matrix is None
    assert checkpoint.dtype(f"{DOWN}.weight") == "F8_E4M3"
    assert words in checkpoint.quantization.lines()[1]


def test_blocks_that_do_not_divide_the_matrix(write: Any, tmp_path: Path) -> None:
    values = write(tmp_path, "block", block=(40, 56), weight_block_size=[40, 56])
    checkpoint = open_checkpoint(str(tmp_path))
    for parameter, expected in values.items():
        assert np.array_equal(checkpoint.tensor(parameter).numpy(), expected), parameter


def test_scales_of_activations_are_noted(write: Any, quantized: Any, tmp_path: Path) -> None:
    write(tmp_path, "tensor", extra=True)
    kv = {f"model.layers.{i}.self_attn.{part}": torch.tensor(1.0) for i in range(2) for part in ("k_scale", "v_scale")}
    quantized.edit(tmp_path, lambda tensors: tensors.update(kv))
    notes = open_checkpoint(str(tmp_path)).quantization.notes
    assert notes == (
        "4 stored scales of the KV cache are not used: the KV cache has the format chosen here",
        "14 stored scales of activations are not used: activations are quantised as the target does it",
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(f"{DOWN}.weight_scale"), "down_proj.weight_scale is missing beside it; expected weight, weight_scale"),
        (lambda t: t.pop(f"{DOWN}.weight"), "down_proj.weight is missing"),
        (
            lambda t: t.update({f"{DOWN}.weight_scale_inv": torch.ones(64, 1)}),
            "is stored beside weight_scale, expected one of the two",
        ),
        (
            lambda t: t.update({f"{DOWN}.weight_scale": torch.ones(63, 1)}),
            r"has shape \[63, 1\], expected \[\] or .* or \[64, 1\]",
        ),
        (lambda t: t.update({f"{DOWN}.weight_scale": torch.ones(2, 3)}), r"has shape \[2, 3\], expected"),
        (lambda t: t[f"{DOWN}.weight_scale"].fill_(float("nan")), "64 scales that are NaN or infinite"),
        (lambda t: t[f"{DOWN}.weight"].view(torch.uint8)[3, 3].fill_(0xFF), "holds NaN, expected finite E4M3 values"),
        (
            lambda t: t.update({f"{DOWN}.weight": t[f"{DOWN}.weight"].float().to(torch.float8_e5m2)}),
            "type F8_E5M2 is not supported",
        ),
        (lambda t: t.update({f"{DOWN}.weight": torch.zeros(64, 96)}), "type F32 is not supported here; supported: F8_E4M3"),
    ],
)
def test_damage_is_one_sentence(change: Callable[[Any], Any], words: str, quantized: Any, write: Any, tmp_path: Path) -> None:
    write(tmp_path, "row")
    quantized.edit(tmp_path, change)
    with pytest.raises(LlmcError, match=words) as caught:
        open_checkpoint(str(tmp_path)).stored_matrix(f"{DOWN}.weight")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [[32], "32x32", [0, 32], [True, 32]])
def test_block_sizes_that_are_none(size: object, write: Any, tmp_path: Path) -> None:
    write(tmp_path, "block", weight_block_size=size)
    with pytest.raises(LlmcError, match="weight_block_size"):
        open_checkpoint(str(tmp_path))
