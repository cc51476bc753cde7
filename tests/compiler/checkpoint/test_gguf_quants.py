"""Matrices kept from GGUF blocks: codes and scales as ggml-common.h lays them out, rows in HF order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.checkpoint.gguf_reader import GgufReader
from llmc.compiler.checkpoint.gguf_tensors import read_tensor
from llmc.compiler.checkpoint.quantized.gguf import GgufWeight
from llmc.errors import CheckpointError

ROWS, COLUMNS = 3, 512
EXACT = {"Q8_0": "int8-g32", "Q4_0": "int4-g32", "Q5_0": "int5-g32", "Q4_1": "int4-g32-asym", "Q5_1": "int5-g32-asym"}
ROUNDED = {"Q4_K": "int4-g32-asym", "Q5_K": "int5-g32-asym"}
CONVERTED = ("Q2_K", "Q3_K", "Q6_K")


def half(block: np.ndarray, at: int) -> float:
    return float(block[at : at + 2].view(np.float16)[0])


def decode(name: str, block: np.ndarray) -> list[tuple[list[int], float, float]]:
    """Codes, scale and minimum of each group of 32, one value after the other."""
    b = [int(byte) for byte in block]
    if name == "Q8_0":
        return [([byte - 256 if byte > 127 else byte for byte in b[2:]], half(block, 0), 0.0)]
    if not name.endswith("_K"):
        asymmetric, five = name.endswith("_1"), name.startswith("Q5")
        high = int.from_bytes(bytes(b[-20:-16]), "little") if five else 0
        codes = [(b[-16 + i % 16] >> (4 if i >= 16 else 0)) % 16 + 16 * (high >> i & 1) for i in range(32)]
        middle = 0 if asymmetric else 16 if five else 8
        return [([code - middle for code in codes], half(block, 0), half(block, 2) if asymmetric else 0.0)]
    groups = []
    for g in range(8):
        if g < 4:
            scale, minimum = b[4 + g] % 64, b[8 + g] % 64
        else:
            scale, minimum = b[8 + g] % 16 + b[g] // 64 * 16, b[8 + g] // 16 + b[4 + g] // 64 * 16
        codes = []
        for i in range(32):
            byte = b[len(b) - 128 + 32 * (g // 2) + i]
            fifth = b[16 + i] >> g & 1 if name == "Q5_K" else 0
            codes.append((byte // 16 if g % 2 else byte % 16) + 16 * fifth)
        groups.append((codes, half(block, 0) * scale, -half(block, 2) * minimum))
    return groups


def random_blocks(name: str, count: int) -> np.ndarray:
    """Random bytes; halves are finite."""
    rng = np.random.default_rng(len(name))
    blocks = rng.integers(0, 256, (count, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]][1]), dtype=np.uint8)
    for at in (0, 2) if name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else (208,) if name == "Q6_K" else (0,):
        blocks[:, at : at + 2] = rng.normal(0, 0.1, (count, 1)).astype(np.float16).view(np.uint8)
    return blocks


def weight(tmp_path: Path, name: str, blocks: np.ndarray) -> tuple[GgufWeight, np.ndarray]:
    """The stored matrix of `blocks`, rows reversed, and its values by the reader of whole tensors."""
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tensor("t", blocks.reshape(ROWS, -1), raw_dtype=gguf.GGMLQuantizationType[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    reader = GgufReader(tmp_path / "t.gguf")
    tensor = reader.tensors["t"]
    values = read_tensor(reader, tensor).numpy()[::-1]
    stored = GgufWeight(
        name, (ROWS, COLUMNS), "t", blocks=lambda: reader.blocks(tensor), reorder=lambda rows: rows[::-1], values=lambda: values
    )
    return stored, values


@pytest.mark.parametrize("name", [*EXACT, *ROUNDED])
def test_codes_and_scales(name: str, tmp_path: Path) -> None:
    per_block = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]][0]
    blocks = random_blocks(name, ROWS * COLUMNS // per_block)
    stored, values = weight(tmp_path, name, blocks)
    groups = [group for block in blocks for group in decode(name, block)]
    matrix = stored.matrix()
    assert matrix is not None
    assert str(matrix.grid) == stored.kind().kept_as == (EXACT | ROUNDED)[name]
    assert np.array_equal(matrix.codes[::-1], np.array([codes for codes, _, _ in groups]).reshape(ROWS, COLUMNS))
    scales = np.array([scale for _, scale, _ in groups], np.float32).reshape(ROWS, -1)
    assert np.array_equal(matrix.scale[::-1], scales.astype(np.float16))
    if matrix.minimum is not None:
        minimums = np.array([minimum for _, _, minimum in groups], np.float32).reshape(ROWS, -1)
        assert np.array_equal(matrix.minimum[::-1], minimums.astype(np.float16))
    error = np.abs(matrix.dequantize() - values).max()
    if name in EXACT:
        assert error <= 1e-7 * np.abs(values).max()  # the products are the same; ggml adds in another order
        assert stored.kind().remark == ""
    else:
        assert 0 < error <= 2.0**-10 * np.abs(values).max()
        assert "rounded to float16" in stored.kind().remark
    assert np.array_equal(stored.dequantize(), values)


@pytest.mark.parametrize("name", CONVERTED)
def test_groups_of_sixteen_are_converted(name: str, tmp_path: Path) -> None:
    stored, _ = weight(tmp_path, name, random_blocks(name, ROWS * COLUMNS // 256))
    assert stored.matrix() is None
    assert str(stored.kind()) == f"{name}: converted (no grid has groups of 16)"


def test_lowest_code_of_eight_bits_is_kept(tmp_path: Path) -> None:
    blocks = random_blocks("Q8_0", ROWS * COLUMNS // 32)
    blocks[:, 2:] = 0x80
    stored, values = weight(tmp_path, "Q8_0", blocks)
    matrix = stored.matrix()
    assert matrix is not None
    assert (matrix.codes == -128).all()
    assert np.array_equal(matrix.dequantize(), values)


def test_products_beyond_float16_are_converted(tmp_path: Path) -> None:
    blocks = random_blocks("Q4_K", ROWS * COLUMNS // 256)
    blocks[:, :4] = np.array([6e4, 6e4], np.float16).view(np.uint8)
    stored, _ = weight(tmp_path, "Q4_K", blocks)
    assert stored.matrix() is None
    assert str(stored.kind()) == "Q4_K: converted (scales and minimums out of float16's range)"


@pytest.mark.parametrize("name", ["Q8_0", "Q4_1", "Q4_K"])
def test_scales_that_are_not_finite(name: str, tmp_path: Path) -> None:
    blocks = random_blocks(name, ROWS * COLUMNS // gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]][0])
    blocks[1, :2] = np.array([np.inf], np.float16).view(np.uint8)
    stored, _ = weight(tmp_path, name, blocks)
    with pytest.raises(CheckpointError, match="t: holds scales that are NaN or infinite"):
        stored.matrix()


@pytest.mark.parametrize(("model_type", "name"), [("llama", "Q4_0"), ("llama", "Q8_0"), ("llama", "Q5_1"), ("qwen2", "Q4_0")])
def test_a_whole_file_in_hf_order(model_type: str, name: str, tiny: Any, tmp_path: Path) -> None:
    """Llama's q and k rows lie interleaved in the file."""
    types = {"model.embed_tokens.weight": "F16"}
    values = tiny.write_gguf(
        tmp_path / "m.gguf", tiny.make_model(model_type), types=lambda parameter: types.get(parameter, name)
    )
    checkpoint = open_checkpoint(str(tmp_path / "m.gguf"))
    for parameter, expected in values.items():
        matrix = checkpoint.stored_matrix(parameter)
        if "proj.weight" in parameter:
            assert matrix.shape == expected.shape
            assert np.abs(matrix.dequantize() - expected).max() <= 1e-7
        assert (matrix is None) is (expected.ndim == 1 or "embed_tokens" in parameter)
    summary = checkpoint.quantization
    assert summary is not None
    assert (summary.method, summary.kept, summary.plain, summary.notes) == ("gguf", 15, 1, ())
    assert summary.lines()[1].endswith(f"{name}: kept as {EXACT[name]}")


def test_a_file_of_floats_has_no_quantization(tiny: Any, tmp_path: Path) -> None:
    tiny.write_gguf(tmp_path / "m.gguf", tiny.make_model("llama"))
    checkpoint = open_checkpoint(str(tmp_path / "m.gguf"))
    assert checkpoint.quantization is None
    assert checkpoint.stored_matrix("model.layers.0.mlp.up_proj.weight") is None
    with pytest.raises(CheckpointError, match="no tensor named 'x'"):
        checkpoint.stored_matrix("x")


@pytest.mark.gemma
def test_gemma_is_kept_where_a_grid_holds_it(gemma_gguf: Path) -> None:
    checkpoint = open_checkpoint(str(gemma_gguf))
    summary = checkpoint.quantization
    assert summary is not None
    assert summary.kept + summary.converted == 127
    for kind, names in summary.tensors.items():
        name = max(names)  # of a layer, not the large embedding
        matrix, values = checkpoint.stored_matrix(name), checkpoint.tensor(name).numpy()
        assert (matrix is None) is (kind.kept_as is None)
        if matrix is not None:
            assert np.abs(matrix.dequantize() - values).max() <= 2.0**-10 * np.abs(values).max()
