"""GPTQ folders packed by the layout's definition: both ways to store zeros, act order, every number of bits, and damage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llmc.compiler.checkpoint import open_checkpoint
from llmc.errors import CheckpointError, LlmcError

Q_PROJ = "model.layers.0.self_attn.q_proj"
CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}


@pytest.fixture(scope="module")
def write(quantized: Any, tiny_checkpoint: Callable[..., Path]) -> Callable[..., dict[str, np.ndarray]]:
    def make(
        path: Path,
        *,
        bits: int = 4,
        group: int = 32,
        symmetric: bool = True,
        offset: int = 1,
        order: bool = False,
        g_idx: bool = True,
        dtype: torch.dtype = torch.float16,
        **config: Any,
    ) -> dict[str, np.ndarray]:
        """`offset` is what version 1 subtracts from zeros; `order` shuffles the columns' groups."""

        def encode(module: str, w: np.ndarray) -> Any:
            if not quantized.in_layers(module):
                return None
            k = w.shape[1]
            columns = np.arange(k) // (k if group == -1 else group)
            if order:
                columns = np.random.default_rng(k).permutation(columns)
            r = quantized.round_weight(w, bits, group, symmetric=symmetric, column_group=columns)
            parts = {
                "qweight": quantized.pack_words(r.codes, bits).T,  # along inputs
                "qzeros": quantized.pack_words((r.zero.T - offset) % 2**bits, bits),  # along outputs
                "scales": torch.from_numpy(r.scale.T.copy()).to(dtype),
            }
            if dtype != torch.float16:
                r.scale = parts["scales"].float().numpy().T
            return (parts | {"g_idx": torch.from_numpy(columns.astype(np.int32))} if g_idx else parts), r.values

        described = {**CONFIG, "bits": bits, "group_size": group, "sym": symmetric, "desc_act": order, **config}
        return quantized.folder(tiny_checkpoint("llama"), path, described, encode)

    return make


def check(path: Path, values: dict[str, np.ndarray], kept_as: str | None, tolerance: float = 0.0) -> Any:
    checkpoint = open_checkpoint(str(path))
    assert checkpoint.tensor_names() == frozenset(values)
    for name, expected in values.items():
        assert np.array_equal(checkpoint.tensor(name).numpy(), expected), name
        matrix = checkpoint.stored_matrix(name)
        if kept_as is None or "proj" not in name:
            assert matrix is None
        else:
            assert str(matrix.grid) == kept_as
            assert np.abs(matrix.dequantize() - expected).max() <= tolerance * np.abs(expected).max()
    return checkpoint


@pytest.mark.parametrize(
    ("bits", "group", "kept_as"),
    [
        (4, 32, "int4-g32"),
        (4, -1, "int4-g128"),
        (3, 64, "int3-g64"),
        (8, 32, "int8-g32"),
        (8, -1, "int8"),
        (2, 32, None),
        (4, 16, None),
    ],
)
def test_symmetric(bits: int, group: int, kept_as: str | None, write: Any, tmp_path: Path) -> None:
    checkpoint = check(tmp_path, write(tmp_path, bits=bits, group=group), kept_as)
    summary = checkpoint.quantization
    assert (summary.kept, summary.converted) == ((14, 0) if kept_as else (0, 14))
    assert ("converted (no grid has" in summary.lines()[1]) is (kept_as is None)


def test_lowest_code_of_eight_bits_is_kept(quantized: Any, write: Any, tmp_path: Path) -> None:
    write(tmp_path, bits=8)
    quantized.edit(tmp_path, lambda tensors: tensors[f"{Q_PROJ}.qweight"].zero_())
    checkpoint = open_checkpoint(str(tmp_path))
    matrix = checkpoint.stored_matrix(f"{Q_PROJ}.weight")
    assert (matrix.codes == -128).all()
    assert np.array_equal(matrix.dequantize(), checkpoint.tensor(f"{Q_PROJ}.weight").numpy())


@pytest.mark.parametrize("declared", [None, "gptq", "gptq_v2"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("offset", [0, 1])
def test_zeros_are_read_as_the_values_say(
    declared: str | None, symmetric: bool, offset: int, write: Any, tmp_path: Path
) -> None:
    values = write(
        tmp_path, symmetric=symmetric, offset=offset, **({} if declared is None else {"checkpoint_format": declared})
    )
    kept_as = "int4-g32" if symmetric else "int4-g32-asym"
    notes = check(tmp_path, values, kept_as, 0.0 if symmetric else 2.0**-11).quantization.notes
    wrong = declared is not None and {"gptq": 1, "gptq_v2": 0}[declared] != offset
    assert len(notes) == wrong
    if wrong:
        assert f"the config says {declared!r}, but by their values zeros are stored" in notes[0]


def test_a_zero_of_zero_wraps(quantized: Any, write: Any, tmp_path: Path) -> None:
    write(tmp_path, symmetric=False, checkpoint_format="gptq")
    quantized.edit(tmp_path, lambda tensors: tensors[f"{Q_PROJ}.qzeros"].fill_(-1))
    matrix = open_checkpoint(str(tmp_path)).stored_matrix(f"{Q_PROJ}.weight")
    assert (matrix.minimum == 0).all()


def test_act_order_is_converted(write: Any, tmp_path: Path) -> None:
    summary = check(tmp_path, write(tmp_path, order=True), None).quantization
    assert summary.lines()[1].endswith("converted (columns are in act order, so neighbours do not share a scale)")


def test_act_order_without_effect_is_kept(write: Any, tmp_path: Path) -> None:
    check(tmp_path, write(tmp_path, desc_act=True), "int4-g32")


def test_g_idx_may_be_absent_or_a_placeholder(quantized: Any, write: Any, tmp_path: Path) -> None:
    values = write(tmp_path, g_idx=False)
    check(tmp_path, values, "int4-g32")
    zeros = torch.zeros(64, dtype=torch.int32)
    quantized.edit(tmp_path, lambda tensors: tensors.update({f"{Q_PROJ}.g_idx": zeros}))
    check(tmp_path, values, "int4-g32")


@pytest.mark.parametrize(("dtype", "rounded"), [(torch.bfloat16, False), (torch.float32, True)])
def test_other_types_of_scales(dtype: torch.dtype, rounded: bool, quantized: Any, write: Any, tmp_path: Path) -> None:
    values = write(tmp_path, dtype=dtype)
    if rounded:  # values that float16 does not hold

        def stretch(tensors: dict[str, torch.Tensor]) -> None:
            for name, tensor in tensors.items():
                if name.endswith(".scales"):
                    tensor.mul_(1.0001)

        quantized.edit(tmp_path, stretch)
        checkpoint = open_checkpoint(str(tmp_path))
        values = {name: checkpoint.tensor(name).numpy() for name in values}
    lines = check(tmp_path, values, "int4-g32", 2.0**-11 if rounded else 0.0).quantization.lines()
    assert ("(scales rounded to float16, by at most 2^-11 of the largest)" in lines[1]) is rounded


@pytest.mark.parametrize("scale", [1e-9, 1e6])
def test_scales_beyond_float16_are_converted(scale: float, quantized: Any, write: Any, tmp_path: Path) -> None:
    write(tmp_path, dtype=torch.float32)
    quantized.edit(tmp_path, lambda tensors: tensors[f"{Q_PROJ}.scales"].mul_(scale))
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.stored_matrix(f"{Q_PROJ}.weight") is None
    assert checkpoint.tensor(f"{Q_PROJ}.weight").abs().max() > 0
    assert (checkpoint.quantization.kept, checkpoint.quantization.converted) == (13, 1)
    assert checkpoint.quantization.lines()[2].startswith("1 x q_proj: ")


def test_biases_of_zeros_that_old_writers_add(quantized: Any, write: Any, tmp_path: Path) -> None:
    values = write(tmp_path)
    bias = torch.zeros(64, dtype=torch.float16)
    quantized.edit(tmp_path, lambda tensors: tensors.update({f"{Q_PROJ}.bias": bias}))
    check(tmp_path, values, "int4-g32")
    quantized.edit(tmp_path, lambda tensors: tensors[f"{Q_PROJ}.bias"].fill_(1))
    with pytest.raises(CheckpointError, match=r"q_proj\.bias: is not zero, but the architecture has no such bias"):
        open_checkpoint(str(tmp_path))


def test_overrides_for_modules(quantized: Any, tiny_checkpoint: Any, tmp_path: Path) -> None:
    def encode(module: str, w: np.ndarray) -> Any:
        if not quantized.in_layers(module) or module.endswith("o_proj"):
            return None
        bits = 8 if "down_proj" in module else 4
        r = quantized.round_weight(w, bits, 32)
        zeros = quantized.pack_words(r.zero.T - 1, bits)
        return {"qweight": quantized.pack_words(r.codes, bits).T, "qzeros": zeros, "scales": torch.tensor(r.scale.T)}, r.values

    dynamic = {"+:.*down_proj": {"bits": 8}, "-:.*o_proj": {}}
    values = quantized.folder(tiny_checkpoint("llama"), tmp_path, {**CONFIG, "dynamic": dynamic}, encode)
    checkpoint = open_checkpoint(str(tmp_path))
    for name, expected in values.items():
        assert np.array_equal(checkpoint.tensor(name).numpy(), expected), name
    kinds = {kind.kept_as: len(names) for kind, names in checkpoint.quantization.tensors.items()}
    assert kinds == {"int4-g32": 10, "int8-g32": 2}


def test_a_config_in_place_of_the_models_own(write: Any, tmp_path: Path) -> None:
    values = write(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    del config["quantization_config"]
    override = tmp_path / "short.json"
    override.write_text(json.dumps({**config, "num_hidden_layers": 1}))
    checkpoint = open_checkpoint(str(tmp_path / "model"), config_override=override)
    assert np.array_equal(checkpoint.tensor(f"{Q_PROJ}.weight").numpy(), values[f"{Q_PROJ}.weight"])
    assert checkpoint.quantization is not None
    assert checkpoint.quantization.kept == 7


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bits": 5}, "bits is 5; supported: 2, 3, 4, 8"),
        ({"bits": None}, "bits is absent, expected an integer"),
        ({"bits": 8}, r"has shape \[3, 64\], expected \[2, 64\] for 8 bits in groups of 32, as the config says"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supported; supported: gptq, gptq_v2"),
        ({"dynamic": {"(": {"bits": 8}}}, "is not a regular expression"),
        ({"dynamic": [1]}, r"dynamic is \[1\], expected an object"),
        ({"dynamic": {".*": 3}}, "is 3, expected an object"),
        ({"group_size": -7}, "group_size is -7, expected an integer"),
    ],
)
def test_a_config_that_does_not_fit(changes: dict[str, Any], words: str, write: Any, tmp_path: Path) -> None:
    write(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(LlmcError, match=words) as caught:
        open_checkpoint(str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(f"{Q_PROJ}.scales"), "q_proj.scales is missing"),
        (lambda t: t.pop(f"{Q_PROJ}.qzeros"), "q_proj.qzeros is missing"),
        (
            lambda t: t.update({f"{Q_PROJ}.weight": torch.ones(64, 64)}),
            r"weight: is stored beside qweight, expected one of the two",
        ),
        (lambda t: t.update({f"{Q_PROJ}.g_idx": torch.zeros(63, dtype=torch.int32)}), r"has shape \[63\], expected \[64\]"),
        (lambda t: t[f"{Q_PROJ}.g_idx"].fill_(2), "g_idx: holds groups 2 to 2, expected 0 to 1"),
        (lambda t: t[f"{Q_PROJ}.g_idx"].fill_(-(2**31)), "holds groups -2147483648 to -2147483648, expected 0 to 1"),
        (lambda t: t[f"{Q_PROJ}.scales"][0, 0].fill_(float("inf")), "1 scales that are NaN or infinite"),
    ],
)
def test_damage_is_one_sentence(change: Callable[[Any], Any], words: str, quantized: Any, write: Any, tmp_path: Path) -> None:
    write(tmp_path)
    quantized.edit(tmp_path, change)
    for read in ("tensor", "stored_matrix"):
        with pytest.raises(CheckpointError, match=words):
            getattr(open_checkpoint(str(tmp_path)), read)(f"{Q_PROJ}.weight")
    with pytest.raises(CheckpointError, match=words) as caught:
        _ = open_checkpoint(str(tmp_path)).quantization
    assert "\n" not in str(caught.value)
