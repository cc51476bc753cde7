"""Dequantised values against decoders written from the block layouts in ggml-common.h."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from llmc.compiler.checkpoint.gguf_reader import SUPPORTED_TYPES, GgufReader
from llmc.compiler.checkpoint.gguf_tensors import hf_names, read_tensor, to_hf_layout

COLUMNS, ROWS = 512, 3
QUANTISED = [name for name in SUPPORTED_TYPES if name not in ("F32", "F16", "BF16")]


def half(block: np.ndarray, at: int) -> float:
    return float(block[at : at + 2].view(np.float16)[0])


def k_scales(packed: np.ndarray) -> tuple[list[int], list[int]]:
    """The eight 6-bit scales and mins of Q4_K and Q5_K (get_scale_min_k4)."""
    scales, mins = [], []
    for j in range(8):
        if j < 4:
            scales.append(int(packed[j]) & 63)
            mins.append(int(packed[j + 4]) & 63)
        else:
            scales.append((int(packed[j + 4]) & 15) | (int(packed[j - 4]) >> 6) << 4)
            mins.append((int(packed[j + 4]) >> 4) | (int(packed[j]) >> 6) << 4)
    return scales, mins


def decode_small(name: str, block: np.ndarray) -> list[float]:
    """Blocks of 32: a scale, maybe a minimum, maybe fifth bits, then nibbles (j and j + 16 share a byte) or bytes."""
    d = half(block, 0)
    if name == "Q8_0":
        return [d * float(q) for q in block[2:34].view(np.int8)]
    low = half(block, 2) if name.endswith("_1") else 0.0
    at = 4 if name.endswith("_1") else 2
    fifth = 0
    if name.startswith("Q5"):
        fifth, at = int(block[at : at + 4].view(np.uint32)[0]), at + 4
    bits = [int(block[at + j % 16]) >> (4 * (j // 16)) & 15 | (fifth >> j & 1) << 4 for j in range(32)]
    if name.endswith("_1"):
        return [d * q + low for q in bits]
    return [d * (q - (16 if name == "Q5_0" else 8)) for q in bits]


def decode_k(name: str, block: np.ndarray) -> list[float]:
    b = [int(byte) for byte in block]
    if name == "Q4_K" or name == "Q5_K":
        d, dmin = half(block, 0), half(block, 2)
        scales, mins = k_scales(block[4:16])
        high, quants = (b[16:48], b[48:176]) if name == "Q5_K" else ([0] * 32, b[16:144])
        out = []
        for j in range(8):
            for i in range(32):
                q = quants[j // 2 * 32 + i] >> (4 * (j % 2)) & 15 | (high[i] >> j & 1) << 4
                out.append(d * scales[j] * q - dmin * mins[j])
        return out
    if name == "Q6_K":
        scales, d = block[192:208].view(np.int8), half(block, 208)
        out = []
        for i in range(256):
            part, r = divmod(i, 128)
            quarter, l = divmod(r, 32)  # noqa: E741 - the name in ggml
            low = b[part * 64 + (quarter % 2) * 32 + l] >> (4 * (quarter // 2)) & 15
            high = b[128 + part * 32 + l] >> (2 * quarter) & 3
            out.append(d * int(scales[i // 16]) * ((low | high << 4) - 32))
        return out
    if name == "Q2_K":
        d, dmin = half(block, 80), half(block, 82)
        out = []
        for i in range(256):
            part, r = divmod(i, 128)
            q = b[16 + part * 32 + r % 32] >> (2 * (r // 32)) & 3
            out.append(d * (b[i // 16] & 15) * q - dmin * (b[i // 16] >> 4))
        return out
    assert name == "Q3_K"
    d, packed = half(block, 108), b[96:108]
    out = []
    for i in range(256):
        part, r = divmod(i, 128)
        low = b[32 + part * 32 + r % 32] >> (2 * (r // 32)) & 3
        high = b[r % 32] >> (part * 4 + r // 32) & 1
        s = i // 16
        scale = (packed[s % 8] >> (4 * (s // 8)) & 15) | (packed[8 + s % 4] >> (2 * (s // 4)) & 3) << 4
        out.append(d * (scale - 32) * (low - (0 if high else 4)))
    return out


def random_blocks(name: str, count: int) -> np.ndarray:
    """Random bytes, with halves where the layout has halves so that every value is finite."""
    kind = gguf.GGMLQuantizationType[name]
    rng = np.random.default_rng(len(name))
    blocks = rng.integers(0, 256, (count, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    places = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}.get(name, (0,))
    if name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K"):
        places = (0, 2)
    for at in places:
        blocks[:, at : at + 2] = rng.normal(0, 0.1, (count, 1)).astype(np.float16).view(np.uint8)
    return blocks


def stored(tmp_path: Path, data: np.ndarray, kind: gguf.GGMLQuantizationType) -> torch.Tensor:
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tensor("t", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    reader = GgufReader(tmp_path / "t.gguf")
    assert reader.tensors["t"].shape == (ROWS, COLUMNS)
    return read_tensor(reader, reader.tensors["t"])


@pytest.mark.parametrize("name", QUANTISED)
def test_blocks_decode_as_ggml_defines_them(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmc.compiler.checkpoint.gguf_tensors._CHUNK_BYTES", 1000)  # several chunks
    kind = gguf.GGMLQuantizationType[name]
    per_block = gguf.GGML_QUANT_SIZES[kind][0]
    blocks = random_blocks(name, ROWS * COLUMNS // per_block)
    decode = decode_k if name.endswith("_K") else decode_small
    expected = np.array([decode(name, block) for block in blocks]).reshape(ROWS, COLUMNS)
    found = stored(tmp_path, blocks.reshape(ROWS, -1), kind)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantised_values_stay_close(name: str, tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType[name]
    values = np.random.default_rng(0).normal(size=(ROWS, COLUMNS)).astype(np.float32)
    found = stored(tmp_path, gguf.quants.quantize(values, kind), kind).numpy()
    assert np.abs(found - values).max() < {"Q4": 0.35, "Q5": 0.2, "Q8": 0.03}[name[:2]]


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_plain_types_are_exact(name: str, tmp_path: Path) -> None:
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[name]
    values = torch.randn(ROWS, COLUMNS).to(dtype)
    raw = values.view(torch.uint8).numpy() if name == "BF16" else values.numpy()
    found = stored(tmp_path, raw, gguf.GGMLQuantizationType[name])
    assert found.dtype == dtype
    assert torch.equal(found, values)


def test_reading_returns_memory_of_its_own(tmp_path: Path) -> None:
    found = stored(tmp_path, np.ones((ROWS, COLUMNS), dtype=np.float32), gguf.GGMLQuantizationType.F32)
    found.zero_()  # a view of the read-only map would crash here


def test_names_agree_with_the_gguf_package() -> None:
    for arch in (gguf.MODEL_ARCH.LLAMA, gguf.MODEL_ARCH.QWEN2, gguf.MODEL_ARCH.QWEN3, gguf.MODEL_ARCH.GEMMA3):
        table = gguf.get_tensor_name_map(arch, 3)
        stored_names = {
            f"{stem.format(bid=2)}.weight"
            for tensor in gguf.MODEL_TENSORS[arch]
            if "exp" not in (stem := gguf.TENSOR_NAMES[tensor]) and "gate_inp" not in stem and "rope" not in stem
        } - {"blk.2.attn_rot_embd.weight", "cls.output.weight", "dense_2.weight", "dense_3.weight"}
        for hf, stored_name in hf_names(gguf.MODEL_ARCH_NAMES[arch], stored_names).items():
            assert table.get_name(hf.removesuffix(".weight")) == stored_name.removesuffix(".weight")


def test_unknown_and_derived_names() -> None:
    names = hf_names("llama", ["rope_freqs.weight", "blk.0.odd.weight", "blk.0.attn_q.bias", "v.weight"])
    assert names == {
        "blk.0.odd.weight": "blk.0.odd.weight",
        "model.layers.0.self_attn.q_proj.bias": "blk.0.attn_q.bias",
        "v.weight": "v.weight",
    }


@pytest.mark.parametrize(("arch", "moved"), [("llama", True), ("qwen2", False), ("gemma3", False)])
def test_only_llama_rows_are_reordered(arch: str, moved: bool) -> None:
    rows = torch.arange(16.0)[:, None].repeat(1, 2)  # 2 heads of 8
    name = "model.layers.0.self_attn.q_proj.weight"
    found = to_hf_layout(name, rows, architecture=arch, heads=2, kv_heads=1)[:, 0].tolist()
    interleaved = [0, 2, 4, 6, 1, 3, 5, 7]
    assert found == ([*interleaved, *(8 + row for row in interleaved)] if moved else list(range(16)))
