"""compressed-tensors folders made from the format's definition: packed, plain and float weights, every strategy, and damage."""

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
from llmc.formats.floats import Fp8Matrix

Q_PROJ = "model.layers.0.self_attn.q_proj"


def described(weights: dict[str, Any], format: str, **changes: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
        **changes,
    }


def pack_apart(codes: np.ndarray, bits: int) -> torch.Tensor:
    """As older writers do: 32 // bits codes to a word, none across two."""
    each = 32 // bits
    words = np.zeros((len(codes), -(-codes.shape[1] // each)), np.uint32)
    for column in range(codes.shape[1]):
        words[:, column // each] |= codes[:, column].astype(np.uint32) << np.uint32(column % each * bits)
    return torch.from_numpy(words.view(np.int32))


@pytest.fixture(scope="module")
def write(quantized: Any, tiny_checkpoint: Callable[..., Path]) -> Callable[..., dict[str, np.ndarray]]:
    def make(
        path: Path,
        *,
        bits: int = 4,
        group: int | None = 32,
        symmetric: bool = True,
        packed: bool = True,
        apart: bool = False,
        order: bool = False,
        architecture: str = "llama",
        modules: Callable[[str], bool] = quantized.in_layers,
        dtype: torch.dtype = torch.bfloat16,
        key: str = "quantization_config",
        **changes: Any,
    ) -> dict[str, np.ndarray]:
        def encode(module: str, w: np.ndarray) -> Any:
            if not modules(module):
                return None
            n, k = w.shape
            columns = np.arange(k) // (group or k)
            if order:
                columns = np.random.default_rng(k).permutation(columns)
            r = quantized.round_weight(w, bits, group or k, symmetric=symmetric, column_group=columns)
            scale = torch.from_numpy(r.scale).to(dtype)
            r.scale = scale.float().numpy()
            pack = pack_apart if apart else quantized.pack_words
            signed = torch.from_numpy(r.codes.astype(np.int64) - 2 ** (bits - 1)).to(torch.int8)
            parts = (
                {"weight_packed": pack(r.codes, bits), "weight_shape": torch.tensor([n, k])} if packed else {"weight": signed}
            )
            parts["weight_scale"] = scale
            if not symmetric:
                zeros = torch.from_numpy(r.zero - 2 ** (bits - 1)).to(torch.int8)
                parts["weight_zero_point"] = pack(r.zero.T, bits).T if packed else zeros
            return (parts | {"weight_g_idx": torch.from_numpy(columns.astype(np.int32))} if order else parts), r.values

        weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "dynamic": False}
        weights |= {"strategy": "group", "group_size": group} if group else {"strategy": "channel", "group_size": None}
        config = described(weights, "pack-quantized" if packed else "int-quantized", **changes)
        return quantized.folder(tiny_checkpoint(architecture), path, config, encode, key=key)

    return make


def check(path: Path, values: dict[str, np.ndarray], kept_as: str | None) -> Any:
    checkpoint = open_checkpoint(str(path))
    assert checkpoint.tensor_names() == frozenset(values)
    for name, expected in values.items():
        assert np.array_equal(checkpoint.tensor(name).numpy(), expected), name
        matrix = checkpoint.stored_matrix(name)
        if kept_as is None or "proj" not in name:
            assert matrix is None
        else:
            assert str(matrix.grid) == kept_as
            error = np.abs(matrix.dequantize() - expected).max()
            assert error <= (2.0**-11 * np.abs(expected).max() if "asym" in kept_as else 0)
    return checkpoint


@pytest.mark.parametrize(
    ("bits", "group", "symmetric", "kept_as"),
    [
        (4, 32, True, "int4-g32"),
        (4, 32, False, "int4-g32-asym"),
        (4, None, True, "int4-g128"),
        (8, 32, True, "int8-g32"),
        (8, 32, False, "int8-g32-asym"),
        (3, 32, True, "int3-g32"),
        (5, 64, False, "int5-g64-asym"),
        (6, 32, True, "int6-g32"),
        (7, 32, True, None),
        (2, 16, True, None),
    ],
)
@pytest.mark.parametrize("apart", [False, True])
def test_packed(bits: int, group: int, symmetric: bool, kept_as: str | None, apart: bool, write: Any, tmp_path: Path) -> None:
    check(tmp_path, write(tmp_path, bits=bits, group=group, symmetric=symmetric, apart=apart), kept_as)


@pytest.mark.parametrize(
    ("bits", "group", "symmetric", "dtype", "kept_as"),
    [
        (8, None, True, torch.bfloat16, "int8"),
        (8, None, True, torch.float32, "int8"),
        (8, None, False, torch.bfloat16, "int8-g128-asym"),
        (8, 64, True, torch.float16, "int8-g64"),
        (4, 32, True, torch.bfloat16, "int4-g32"),
        (4, 32, False, torch.bfloat16, "int4-g32-asym"),
    ],
)
def test_plain_integers(
    bits: int, group: int | None, symmetric: bool, dtype: torch.dtype, kept_as: str, write: Any, tmp_path: Path
) -> None:
    check(tmp_path, write(tmp_path, bits=bits, group=group, symmetric=symmetric, dtype=dtype, packed=False), kept_as)


def test_act_order(write: Any, tmp_path: Path) -> None:
    summary = check(tmp_path, write(tmp_path, order=True), None).quantization
    assert summary.converted == 14


def test_an_unset_order_is_none(quantized: Any, write: Any, tmp_path: Path) -> None:
    values = write(tmp_path)
    unset = {f"{Q_PROJ}.weight_g_idx": torch.full((64,), -1, dtype=torch.int32)}
    quantized.edit(tmp_path, lambda tensors: tensors.update(unset))
    check(tmp_path, values, "int4-g32")


@pytest.mark.parametrize("layout", ["tensor", "channel", "block"])
def test_floats(layout: str, quantized: Any, tiny_checkpoint: Any, tmp_path: Path) -> None:
    def encode(module: str, w: np.ndarray) -> Any:
        if not quantized.in_layers(module):
            return None
        n, k = w.shape
        rows, columns = {"tensor": (n, k), "channel": (1, k), "block": (16, 48)}[layout]
        shape = (-(-n // rows), -(-k // columns))
        scale = torch.from_numpy(np.random.default_rng(n).uniform(0.01, 0.02, shape)).bfloat16()
        wide = scale.float().repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]
        stored = (torch.from_numpy(w) / wide).to(torch.float8_e4m3fn)
        parts = {"weight": stored, "weight_scale": scale.reshape(1) if layout == "tensor" else scale}
        return parts, (stored.float() * wide).numpy()

    weights = {"num_bits": 8, "type": "float", "strategy": layout, "symmetric": True}
    weights |= {"block_structure": [16, 48]} if layout == "block" else {}
    values = quantized.folder(tiny_checkpoint("llama"), tmp_path, described(weights, "float-quantized"), encode)
    checkpoint = open_checkpoint(str(tmp_path))
    for name, expected in values.items():
        assert np.array_equal(checkpoint.tensor(name).numpy(), expected), name
        matrix = checkpoint.stored_matrix(name)
        assert isinstance(matrix, Fp8Matrix) is ("proj" in name and layout != "block")
        assert matrix is None or np.array_equal(matrix.dequantize(), expected)


def _rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((path / "config.json").read_text())
    change(config)
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("stored_as", ["model.embed_tokens", "lm_head"])
def test_a_tied_matrix_that_is_quantised(stored_as: str, quantized: Any, write: Any, tmp_path: Path) -> None:
    values = write(tmp_path, modules=lambda module: quantized.in_layers(module) or module == stored_as, ignore=[])
    other = "lm_head" if stored_as != "lm_head" else "model.embed_tokens"
    quantized.edit(tmp_path, lambda tensors: tensors.pop(f"{other}.weight"))

    def tie(config: dict[str, Any]) -> None:
        config["tie_word_embeddings"] = True
        config["quantization_config"]["config_groups"]["group_0"]["targets"] = ["Linear", "Embedding"]

    _rewrite(tmp_path, tie)
    checkpoint = open_checkpoint(str(tmp_path))
    assert "lm_head.weight" not in checkpoint.tensor_names()
    assert np.array_equal(checkpoint.tensor("model.embed_tokens.weight").numpy(), values[f"{stored_as}.weight"])
    assert str(checkpoint.stored_matrix("model.embed_tokens.weight").grid) == "int4-g32"


def test_schemes_by_name_by_expression_and_by_class(quantized: Any, tiny_checkpoint: Any, tmp_path: Path) -> None:
    def bits_of(module: str) -> int:
        return 3 if module == Q_PROJ else 8 if "down_proj" in module else 4

    def encode(module: str, w: np.ndarray) -> Any:
        if not quantized.in_layers(module):
            return None
        r = quantized.round_weight(w, bits_of(module), 32)
        packed = quantized.pack_words(r.codes, bits_of(module))
        return {
            "weight_packed": packed,
            "weight_shape": torch.tensor(w.shape),
            "weight_scale": torch.from_numpy(r.scale),
        }, r.values

    groups = {
        f"group_{i}": {"targets": [target], "weights": {"num_bits": bits, "strategy": "group", "group_size": 32}}
        for i, (target, bits) in enumerate([("Linear", 4), ("re:.*down_proj$", 8), (Q_PROJ, 3)])
    }
    config = described({}, "mixed-precision", config_groups=groups)
    values = quantized.folder(tiny_checkpoint("llama"), tmp_path, config, encode)
    checkpoint = open_checkpoint(str(tmp_path))
    for name, expected in values.items():
        assert np.array_equal(checkpoint.tensor(name).numpy(), expected), name
    assert {k.kept_as: len(v) for k, v in checkpoint.quantization.tensors.items()} == {
        "int4-g32": 11,
        "int8-g32": 2,
        "int3-g32": 1,
    }


def test_an_older_compression_config(write: Any, tmp_path: Path) -> None:
    check(tmp_path, write(tmp_path, key="compression_config"), "int4-g32")


def test_prefixes_of_multimodal_checkpoints(quantized: Any, write: Any, tmp_path: Path) -> None:
    values = write(tmp_path)

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[f"language_model.{name}"] = tensors.pop(name)

    quantized.edit(tmp_path, rename)
    _rewrite(tmp_path, lambda config: config["quantization_config"].update(ignore=["language_model.lm_head"]))
    target = ["re:language_model.*proj"]
    _rewrite(tmp_path, lambda config: config["quantization_config"]["config_groups"]["group_0"].update(targets=target))
    check(tmp_path, values, "int4-g32")


def test_scales_of_the_kv_cache_are_noted(quantized: Any, write: Any, tmp_path: Path) -> None:
    write(tmp_path, kv_cache_scheme={"num_bits": 8, "type": "float", "strategy": "tensor"})
    scales = {f"model.layers.{i}.self_attn.{part}": torch.ones(1) for i in range(2) for part in ("k_scale", "v_scale")}
    quantized.edit(tmp_path, lambda tensors: tensors.update(scales))
    notes = open_checkpoint(str(tmp_path)).quantization.notes
    assert notes[0].startswith("the config's kv_cache_scheme is not used")
    assert notes[1].startswith("4 stored scales of the KV cache are not used")


@pytest.mark.parametrize("with_scales", [False, True])
def test_weights_saved_without_compression_are_refused(
    with_scales: bool, quantized: Any, tiny_checkpoint: Any, tmp_path: Path
) -> None:
    def encode(module: str, w: np.ndarray) -> Any:
        if not quantized.in_layers(module):
            return None
        parts = {"weight": torch.from_numpy(w).bfloat16()}
        return (parts | {"weight_scale": torch.ones(len(w), 1)} if with_scales else parts), w

    config = described({"num_bits": 4, "strategy": "group", "group_size": 32}, "pack-quantized")
    quantized.folder(tiny_checkpoint("llama"), tmp_path, config, encode)
    words = "stored as BF16 beside its scales" if with_scales else "14 of 14 matrices are stored unquantised as BF16"
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(str(tmp_path))
    if not with_scales:  # the config itself says that they are plain
        _rewrite(tmp_path, lambda config: config["quantization_config"].update(ignore=["re:.*"]))
        assert open_checkpoint(str(tmp_path)).quantization.kept == 0


def _weights(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config["config_groups"]["group_0"]["weights"].update(changes)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda c: c.update(format="nvfp4-pack-quantized"),
            "format 'nvfp4-pack-quantized' is not supported; supported: pack-quantized,",
        ),
        (lambda c: c.update(sparsity_config={"format": "sparse-24-bitmask"}), "sparse weights are not supported"),
        (lambda c: c.update(transform_config={"config_groups": {"u": {}}}), "transforms are not supported"),
        (lambda c: c.update(config_groups={"W4A16": ["Linear"]}), r"W4A16 is \['Linear'\], expected an object"),
        (lambda c: c.update(config_groups={"a\nb": 3}), r"config_groups.'a\\nb' is 3, expected an object"),
        (lambda c: c.update(config_groups={}), "no target matches model.layers.0.mlp.down_proj"),
        (lambda c: c["config_groups"]["group_0"].update(targets=["re:["]), "is not a regular expression"),
        (_weights(num_bits=16), "num_bits is 16; supported: 2 to 8"),
        (_weights(type="float", num_bits=4), r"num_bits is 4; supported: 8 \(E4M3\)"),
        (_weights(type="complex"), "type 'complex' is not supported; supported: int, float"),
        (_weights(strategy="token"), "strategy 'token' is not supported"),
        (_weights(strategy="block"), "strategy 'block' needs type 'float' and block_structure"),
        (_weights(group_size=None), "group_size is absent, expected the columns of a group"),
        (_weights(group_size=64), r"weight_scale: has shape \[64, 3\], expected \[64, 2\]"),
        (_weights(num_bits=8), r"weight_packed: has shape \[64, 12\], expected \[64, 24\]"),
        (_weights(symmetric=False), "weight_zero_point is missing"),
        (
            _weights(type="float", num_bits=8, strategy="channel"),
            r"weight_scale: has shape \[64, 3\], expected \[64, 1\] or \[64\]",
        ),
    ],
)
def test_a_config_that_does_not_fit(change: Callable[[Any], Any], words: str, write: Any, tmp_path: Path) -> None:
    write(tmp_path)
    _rewrite(tmp_path, lambda config: change(config["quantization_config"]))
    with pytest.raises(LlmcError, match=words) as caught:
        open_checkpoint(str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(f"{Q_PROJ}.weight_scale"), "q_proj.weight_scale is missing"),
        (lambda t: t.pop(f"{Q_PROJ}.weight_shape"), "q_proj.weight_shape is missing"),
        (
            lambda t: t.update({f"{Q_PROJ}.weight": torch.ones(64, 64).to(torch.int8)}),
            "is stored beside weight, expected one of the two",
        ),
        (lambda t: t[f"{Q_PROJ}.weight_shape"].fill_(-1), r"weight_shape: holds \[-1, -1\], expected two positive sizes"),
        (lambda t: t[f"{Q_PROJ}.weight_shape"].copy_(torch.tensor([64, 1 << 39])), "weight_packed: has shape"),
        (lambda t: t[f"{Q_PROJ}.weight_scale"].fill_(float("-inf")), "128 scales that are NaN or infinite"),
        (
            lambda t: t.update({f"{Q_PROJ}.weight_zero_point": torch.ones(64, 2, dtype=torch.int8)}),
            "other than 0, but the config says",
        ),
        (
            lambda t: t.update({f"{Q_PROJ}.weight_zero_point": torch.ones(3, dtype=torch.int8)}),
            r"has shape \[3\], expected \[64, 2\]",
        ),
        (
            lambda t: t.update({f"{Q_PROJ}.weight_g_idx": torch.arange(64, dtype=torch.int32)}),
            "holds groups 0 to 63, expected 0 to 1",
        ),
    ],
)
def test_damage_is_one_sentence(change: Callable[[Any], Any], words: str, quantized: Any, write: Any, tmp_path: Path) -> None:
    write(tmp_path)
    quantized.edit(tmp_path, change)
    with pytest.raises(LlmcError, match=words) as caught:
        open_checkpoint(str(tmp_path)).stored_matrix(f"{Q_PROJ}.weight")
    assert "\n" not in str(caught.value)


def test_codes_of_more_bits_than_the_config_says(quantized: Any, write: Any, tmp_path: Path) -> None:
    write(tmp_path, packed=False)
    quantized.edit(tmp_path, lambda tensors: tensors[f"{Q_PROJ}.weight"].fill_(8))
    with pytest.raises(CheckpointError, match="holds codes 8 to 8, more than 4 bits"):
        open_checkpoint(str(tmp_path)).tensor(f"{Q_PROJ}.weight")
