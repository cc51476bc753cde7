"""Claims against contents: honest files pass, and files that only say they are quantised are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from llmc.codegen.export.packed_codes import pack_matrix
from llmc.compiler.cli import main
from llmc.compiler.verdict import is_quantized
from llmc.compiler.verdict_bundle import judge_weights
from llmc.errors import CheckpointError
from llmc.formats.grid import Grid
from llmc.formats.round_to_nearest import round_to_nearest
from llmc.runtime.program import WeightSpec
from safetensors.torch import save_file

_W = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
_MODULES = [f"model.layers.{i}.mlp.{kind}_proj" for i in range(2) for kind in ("gate", "down")]


def _gguf(path: Path, stored: dict[str, str], file_type: int | None) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    if file_type is not None:
        writer.add_file_type(file_type)
    for name, type_name in {"token_embd.weight": "Q8_0", **stored}.items():
        kind = gguf.GGMLQuantizationType[type_name]
        writer.add_tensor(name, gguf.quants.quantize(_W.numpy(), kind), raw_dtype=kind)
    writer.add_tensor("blk.0.attn_norm.weight", np.ones(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _compressed(bits: int, group: int = 32, **changes: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": group}
    scheme = {"targets": ["Linear"], "weights": weights}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]}
    return config | {"config_groups": {"group_0": scheme}} | changes


def _folder(path: Path, quantization: dict[str, Any] | None, modules: dict[str, dict[str, torch.Tensor]]) -> Path:
    path.mkdir()
    config = {"model_type": "llama", "dtype": "bfloat16"} | ({"quantization_config": quantization} if quantization else {})
    (path / "config.json").write_text(json.dumps(config))
    tensors = {f"{module}.{suffix}": tensor.clone() for module, parts in modules.items() for suffix, tensor in parts.items()}
    save_file({"model.embed_tokens.weight": _W.bfloat16(), **tensors}, path / "model.safetensors")
    return path


def _packed(name: str) -> dict[str, torch.Tensor]:
    grid = Grid.parse(name)
    assert grid is not None
    return pack_matrix(round_to_nearest(_W, grid))


@pytest.mark.parametrize(
    ("types", "file_type", "problem"),
    [
        (("Q4_0", "Q4_0"), 2, None),
        (("Q4_0", "Q5_0"), 15, None),  # Q4_K_M with rows that are no multiple of 256
        (("F16", "F16"), 1, None),
        (("F16", "F16"), None, None),  # claims nothing
        (
            ("F16", "F16"),
            2,
            "2 of 2 matrices in layers, 100% of the weights, are stored unquantised, first blk.0.ffn_up.weight as F16",
        ),
        (("Q4_0", "BF16"), 2, "1 of 2 matrices in layers, 50% of the weights"),
        (("Q8_0", "Q8_0"), 2, "4.5 bits a weight, but the layers take 8.5"),
        (("Q4_0", "Q4_0"), 1, "16 bits a weight, but the layers hold only 4.5"),
    ],
)
def test_gguf(tmp_path: Path, types: tuple[str, str], file_type: int | None, problem: str | None) -> None:
    stored = dict(zip(("blk.0.ffn_up.weight", "blk.1.ffn_up.weight"), types, strict=True))
    verdict = is_quantized(_gguf(tmp_path / "m.gguf", stored, file_type))
    assert verdict.ok == (problem is None)
    assert problem is None or problem in verdict.problems[0]


def test_compressed_tensors_that_are_what_they_claim(tmp_path: Path) -> None:
    modules = {module: _packed("int4-g32") for module in _MODULES} | {"lm_head": {"weight": _W.bfloat16()}}
    verdict = is_quantized(_folder(tmp_path / "m", _compressed(4), modules))
    assert verdict.problems == []
    assert verdict.layer_bits == 4
    assert [(row.place, row.type_name) for row in verdict.rows] == [("layers", "I32"), ("embedding and head", "BF16")]


@pytest.mark.parametrize(
    ("quantization", "parts", "problem"),
    [
        (_compressed(4), {"weight": _W.bfloat16()}, "4 matrices are stored unquantised as BF16, first model.layers.0"),
        (_compressed(4), {"weight": _W.char()}, "take 8 bits a weight, not 4"),
        (_compressed(4), _packed("int8-g32"), "take 8 bits a weight, not 4"),
        (None, _packed("int4-g32"), "claims no quantisation (bfloat16), but 4 matrices are stored as I32"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, {"weight": _W.half()}, "stored unquantised as F16"),
        ({"quant_method": "fp8"}, {"weight": _W.bfloat16()}, "claims fp8, 8 bits, but 4 matrices are stored unquantised"),
    ],
)
def test_folders_that_only_claim(
    tmp_path: Path, quantization: dict[str, Any] | None, parts: dict[str, torch.Tensor], problem: str
) -> None:
    verdict = is_quantized(_folder(tmp_path / "m", quantization, dict.fromkeys(_MODULES, parts)))
    assert len(verdict.problems) == 1
    assert problem in verdict.problems[0]


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_bits_of_gptq_and_awq_come_from_their_scales(tmp_path: Path, method: str) -> None:
    """64 outputs of 256 inputs in groups of 32: GPTQ packs inputs, AWQ outputs."""
    shapes = {"gptq": ((256 // 8, 64), (256 // 4, 64)), "awq": ((256, 64 // 8), (256, 64 // 4))}[method]
    config = {"quant_method": method, "bits": 4, "group_size": 32, "modules_to_not_convert": ["down_proj"]}
    for index, shape in enumerate(shapes):
        parts = {"qweight": torch.zeros(shape, dtype=torch.int32), "scales": torch.ones(8, 64).half()}
        modules = {module: {"weight": _W.half()} if "down" in module else parts for module in _MODULES}
        verdict = is_quantized(_folder(tmp_path / str(index), config, modules))
        assert verdict.problems == ([] if index == 0 else [verdict.problems[0]])
        assert index == 0 or "2 matrices take 8 bits a weight, not 4" in verdict.problems[0]


def test_damaged_files_are_problems_and_others_errors(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "m", _compressed(4), dict.fromkeys(_MODULES, _packed("int4-g32")))
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "download the file again" in is_quantized(folder).problems[0]
    path = _gguf(tmp_path / "m.gguf", {"blk.0.ffn_up.weight": "Q4_0"}, 2)
    path.write_bytes(path.read_bytes()[:-100])
    assert "damaged GGUF" in is_quantized(path).problems[0]
    (tmp_path / "text").write_text("no model")
    with pytest.raises(CheckpointError, match="neither a GGUF"):
        is_quantized(tmp_path / "text")


def test_the_command_exits_1_where_the_claim_is_false(tmp_path: Path) -> None:
    honest = _gguf(tmp_path / "a.gguf", {"blk.0.ffn_up.weight": "Q4_0"}, 2)
    done = CliRunner().invoke(main, ["verify", str(honest)])
    assert (done.exit_code, "as claimed" in done.stdout) == (0, True)
    fake = _folder(tmp_path / "m", _compressed(4), {module: {"weight": _W.bfloat16()} for module in _MODULES})
    done = CliRunner().invoke(main, ["verify", str(fake)])
    assert done.exit_code == 1
    assert "the config claims compressed-tensors pack-quantized, 4 bits, but 4 matrices are stored unquantised" in done.stderr
    done = CliRunner().invoke(main, ["verify", str(fake), "--json"])
    assert done.exit_code == 1
    assert json.loads(done.stdout)["layer_bits_per_weight"] == 16


@pytest.mark.parametrize(
    ("scheme", "dtype", "ok"), [("int4", "U8", True), ("int4", "BF16", False), ("bf16", "BF16", True), ("f32", "U8", False)]
)
def test_bundles(scheme: str, dtype: str, ok: bool) -> None:
    weights = [
        WeightSpec(name="model.embed_tokens.weight", dtype="U8", shape=[16, 64]),
        WeightSpec(name="model.layers.0.mlp.down_proj.weight", dtype=dtype, shape=[4, 8, 16, 4]),
        WeightSpec(name="model.layers.0.mlp.down_proj.weight.scale", dtype="F16", shape=[4, 2, 16]),
        WeightSpec(name="model.layers.0.input_layernorm.weight", dtype="F32", shape=[64]),
    ]
    assert (judge_weights("cpu-int4", scheme, weights).problem is None) == ok
