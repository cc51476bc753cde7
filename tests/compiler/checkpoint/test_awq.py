"""AWQ folders packed by the layout's definition: codes, values, summary, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llmc
import numpy as np
import pytest
import torch
from llmc.compiler.checkpoint import open_checkpoint
from llmc.errors import CheckpointError, LlmcError, UnsupportedModelError

Q_PROJ = "model.layers.0.self_attn.q_proj"
CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "GEMM"}


def pack(codes: np.ndarray) -> torch.Tensor:
    """`[R, N]` to int32 `[R, N/8]`: the eight nibbles of a word are outputs 0, 2, 4, 6, 1, 3, 5, 7."""
    words = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint32)
    for nibble, output in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
        words |= codes[:, output::8].astype(np.uint32) << np.uint32(4 * nibble)
    return torch.from_numpy(words.view(np.int32))


@pytest.fixture(scope="module")
def write(quantized: Any, tiny_checkpoint: Callable[..., Path]) -> Callable[..., dict[str, np.ndarray]]:
    def make(path: Path, *, group: int = 32, symmetric: bool = False, architecture: str = "llama", **config: Any) -> Any:
        def encode(module: str, w: np.ndarray) -> Any:
            if not quantized.in_layers(module):
                return None
            r = quantized.round_weight(w, 4, w.shape[1] if group == -1 else group, symmetric=symmetric)
            parts = {"qweight": pack(r.codes.T), "qzeros": pack(r.zero.T), "scales": torch.from_numpy(r.scale.T.copy())}
            return parts, r.values

        return quantized.folder(tiny_checkpoint(architecture), path, {**CONFIG, "group_size": group, **config}, encode)

    return make


@pytest.mark.parametrize("group", [32, 64, -1])
@pytest.mark.parametrize("symmetric", [True, False])
def test_values_and_matrices(group: int, symmetric: bool, write: Any, tmp_path: Path) -> None:
    values = write(tmp_path, group=group, symmetric=symmetric)
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.tensor_names() == frozenset(values)
    for name, expected in values.items():
        assert checkpoint.shape(name) == expected.shape
        assert np.array_equal(checkpoint.tensor(name).float().numpy(), expected), name
        matrix = checkpoint.stored_matrix(name)
        if not name.startswith("model.layers.") or "norm" in name:
            assert matrix is None
            continue
        grid = f"int4-g{128 if group == -1 else group}" + ("" if symmetric else "-asym")
        assert str(matrix.grid) == grid
        if symmetric:
            assert np.array_equal(matrix.dequantize(), expected)
        else:
            step = np.abs(expected).max() * 2.0**-11
            assert np.abs(matrix.dequantize() - expected).max() <= step
    assert checkpoint.dtype(f"{Q_PROJ}.weight") == "INT4"
    assert checkpoint.dtype("lm_head.weight") == "F32"


def test_summary_counts_and_says_what_is_rounded(write: Any, tmp_path: Path) -> None:
    write(tmp_path)
    summary = open_checkpoint(str(tmp_path)).quantization
    assert summary is not None
    assert (summary.method, summary.kept, summary.converted, summary.plain) == ("awq", 14, 0, 2)
    lines = summary.lines()
    assert lines[0] == "awq: 14 of 16 matrices are quantised"
    assert lines[1].startswith(
        "14 x down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj: 4 bits in groups of 32, asymmetric"
    )
    assert lines[1].endswith("kept as int4-g32-asym (minimums rounded to float16, by at most 2^-11 of the largest)")
    assert len(lines) == 2


def test_biases_and_a_tied_head(write: Any, tmp_path: Path) -> None:
    values = write(tmp_path, architecture="qwen2")
    checkpoint = open_checkpoint(str(tmp_path))
    bias = f"{Q_PROJ}.bias"
    assert np.array_equal(checkpoint.tensor(bias).numpy(), values[bias])


def test_modules_that_stay_plain(quantized: Any, write: Any, tmp_path: Path) -> None:
    values = write(tmp_path, modules_to_not_convert=["o_proj"])

    def restore(tensors: dict[str, torch.Tensor]) -> None:
        for layer in range(2):
            stem = f"model.layers.{layer}.self_attn.o_proj"
            for part in ("qweight", "qzeros", "scales"):
                del tensors[f"{stem}.{part}"]
            tensors[f"{stem}.weight"] = torch.from_numpy(values[f"{stem}.weight"]).bfloat16()

    quantized.edit(tmp_path, restore)
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.dtype("model.layers.1.self_attn.o_proj.weight") == "BF16"
    assert checkpoint.quantization is not None
    assert (checkpoint.quantization.kept, checkpoint.quantization.plain) == (12, 4)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = None
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError, match=r"says awq, but 2 of 14 matrices are stored unquantised as BF16 \(first .*o_proj"
    ):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"quant_method": "bitsandbytes"},
            "quant_method 'bitsandbytes' is not supported; supported: awq, compressed-tensors, fp8, gptq",
        ),
        ({"quant_method": None}, "quant_method None is not supported"),
        ({"version": "gemv"}, "version 'gemv' is not supported; supported: gemm"),
        ({"bits": 3}, "bits is 3; the gemm layout of AWQ has 4"),
        ({"bits": "four"}, "bits is 'four', expected an integer"),
        ({"group_size": 0}, "group_size is 0, expected -1 for a whole row"),
        ({"group_size": 16}, r"scales: has shape \[3, 64\], expected \[6, 64\] for groups of 16, as the config says"),
        ({"zero_point": "yes"}, "zero_point is 'yes', expected true or false"),
        ({"zero_point": False}, "holds zeros other than 8"),
        ({"modules_to_not_convert": "lm_head"}, "expected a list of module names"),
    ],
)
def test_a_config_that_does_not_fit(changes: dict[str, Any], words: str, write: Any, tmp_path: Path) -> None:
    write(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(LlmcError, match=words) as caught:
        open_checkpoint(str(tmp_path)).tensor(f"{Q_PROJ}.weight")
    assert "\n" not in str(caught.value)


def _cut(tensors: dict[str, torch.Tensor], part: str) -> None:
    tensors[f"{Q_PROJ}.{part}"] = tensors[f"{Q_PROJ}.{part}"][:, :-1].contiguous()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(f"{Q_PROJ}.scales"), "q_proj.scales is missing beside it; expected qweight, scales, qzeros"),
        (lambda t: t.pop(f"{Q_PROJ}.qweight"), "q_proj.qweight is missing"),
        (lambda t: t.pop(f"{Q_PROJ}.qzeros"), "q_proj.qzeros is missing"),
        (lambda t: t.update({"a\nb.qweight": torch.zeros(8, 1, dtype=torch.int32)}), r"'a\\nb'.scales is missing beside it"),
        (lambda t: _cut(t, "scales"), r"q_proj.scales: has shape \[2, 63\], expected \[2, 64\]"),
        (lambda t: _cut(t, "qzeros"), r"q_proj.qzeros: has shape \[2, 7\], expected \[2, 8\]"),
        (lambda t: _cut(t, "qweight"), r"q_proj.scales: has shape \[2, 64\], expected \[2, 56\]"),
        (
            lambda t: t.update({f"{Q_PROJ}.qweight": torch.zeros(4, dtype=torch.int32)}),
            r"has shape \[4\], expected 2 dimensions",
        ),
        (lambda t: t.update({f"{Q_PROJ}.qweight": torch.zeros(0, 8, dtype=torch.int32)}), r"has shape \[0, 8\]"),
        (
            lambda t: t.update({f"{Q_PROJ}.qweight": torch.zeros(64, 8)}),
            "stored type F32 is not supported here; supported: I32",
        ),
        (lambda t: t[f"{Q_PROJ}.scales"].fill_(float("nan")), "128 scales that are NaN or infinite"),
    ],
)
def test_damage_is_one_sentence(change: Callable[[Any], Any], words: str, quantized: Any, write: Any, tmp_path: Path) -> None:
    write(tmp_path)
    quantized.edit(tmp_path, change)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=words) as caught:
        open_checkpoint(str(tmp_path)).stored_matrix(f"{Q_PROJ}.weight")
    assert "\n" not in str(caught.value)
    assert "model.safetensors" in str(caught.value)


def test_plain_weights_under_a_quantised_config(tiny_checkpoint: Any, quantized: Any, tmp_path: Path) -> None:
    quantized.folder(tiny_checkpoint("llama"), tmp_path, CONFIG, lambda module, w: None)
    with pytest.raises(CheckpointError, match=r"says awq, but 14 of 14 matrices are stored unquantised as F32"):
        open_checkpoint(str(tmp_path))


def test_unknown_names(write: Any, tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(CheckpointError, match="no tensor named"):
        open_checkpoint(str(tmp_path)).stored_matrix(f"{Q_PROJ}.qweight")


@torch.no_grad()
def test_a_compiled_bundle_computes_with_the_dequantised_weights(
    write: Any, tiny_model: Callable[..., Any], tmp_path: Path
) -> None:
    values = write(tmp_path / "awq")
    model = tiny_model("llama")
    for name, parameter in model.named_parameters():
        parameter.copy_(torch.from_numpy(values[name]))
    out = tmp_path / "model.llmc"
    llmc.compile(tmp_path / "awq", target="cpu-f32", cpu_levels=("native",), max_tokens=16, output=out)
    tokens = list(range(5, 30))
    with llmc.load(out) as engine:
        expected = model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()
        np.testing.assert_allclose(engine.logits(tokens), expected, rtol=0, atol=2e-4)
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
