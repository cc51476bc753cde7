"""Exports of tiny models: llama.cpp and transformers compute from them what llmc does, and what is damaged on the way is not kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import llmc
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from llmc.codegen.export import gguf_blocks, packed_codes
from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.cli import main
from llmc.compiler.export import CheckpointModel, ExportOptions, run
from llmc.compiler.verdict import is_quantized
from llmc.errors import UnsupportedModelError, UsageError, VerificationError
from llmc.formats.grid import Grid

_TOKENS = np.random.default_rng(0).integers(3, 262, 60).tolist()


def _divergence(reference: np.ndarray, logits: np.ndarray) -> float:
    """Mean KL in nats."""
    p, q = (torch.from_numpy(np.ascontiguousarray(x, np.float32)).log_softmax(-1) for x in (reference, logits))
    return float((p.exp() * (p - q)).sum(-1).mean())


def _llama_cpp(path: Path) -> np.ndarray:
    llama_cpp = pytest.importorskip("llama_cpp")
    model = llama_cpp.Llama(str(path), n_ctx=128, n_threads=1, n_threads_batch=1, logits_all=True, verbose=False)
    try:
        assert model.tokenize(b"the theme", add_bos=False) == _encode(path, "the theme")
        model.eval(_TOKENS)
        return np.array(model.scores[: len(_TOKENS)])
    finally:
        model.close()


def _encode(path: Path, text: str) -> list[int]:
    from tokenizers import Tokenizer

    folder = path.with_suffix(".tokenizer")
    open_checkpoint(str(path)).write_tokenizer(folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids


@torch.no_grad()
def _hugging_face(config: Any, value: Callable[[str], torch.Tensor]) -> np.ndarray:
    """Logits in float32 of the parameters that `value` gives."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in reference.named_parameters():
        parameter.copy_(value(name))
    return reference(torch.tensor([_TOKENS]), use_cache=False).logits[0].numpy()


def _decoded(model: CheckpointModel) -> Callable[[str], torch.Tensor]:
    return lambda name: torch.from_numpy(model.quantized(name).dequantize()) if model.grid(name) else model.tensor(name)


@pytest.mark.slow  # it compiles a bundle
def test_llama_cpp_computes_what_the_engine_does(
    exportable: Callable[[str], Path], tiny_bundle: Callable[..., Path], tmp_path: Path
) -> None:
    """The file holds the codes of the bundle: int4-g32 in layers, int8-g32 in embedding and head."""
    out = tmp_path / "m.gguf"
    report = run(ExportOptions(model=str(exportable("qwen2")), quantization="int4-g32", head_type="Q8_0", output=out))
    assert report.tensors == {"Q8_0": 2, "F32": 11, "Q4_0": 14}
    assert report.exact == 14
    assert is_quantized(out).ok
    with llmc.load(tiny_bundle("qwen2", "int4-g32")) as engine:
        logits = np.array(engine.logits(_TOKENS))
    source = open_checkpoint(str(exportable("qwen2")))
    quantised = _divergence(_hugging_face(source.config, source.tensor), logits)
    assert _divergence(logits, _llama_cpp(out)) < min(3e-3, quantised / 20)  # each rounds activations in its way


@pytest.mark.parametrize(
    ("family", "quantization", "type_name", "stored"),
    [
        ("llama", "int4-g32", None, "Q4_0"),
        ("gemma3", "int4-g64", None, "Q4_0"),
        ("gemma3", "int5-g32-asym", None, "Q5_1"),
        ("qwen3", None, "Q4_K", "Q4_K"),
        ("qwen3", None, "Q6_K", "Q6_K"),
        ("mistral", "int8", None, "Q8_0"),
        ("mistral", None, "Q4_K", "Q5_0"),  # rows of 64 and 128
    ],
)
def test_llama_cpp_computes_what_hugging_face_does(
    exportable: Callable[[str], Path],
    tmp_path: Path,
    family: str,
    quantization: str | None,
    type_name: str | None,
    stored: str,
) -> None:
    out = tmp_path / "m.gguf"
    report = run(ExportOptions(model=str(exportable(family)), quantization=quantization, type=type_name, output=out))
    assert stored in report.tensors
    assert bool(report.notes) == (family != "qwen3")
    found = open_checkpoint(str(out))
    assert _divergence(_hugging_face(found.config, found.tensor), _llama_cpp(out)) < 3e-3
    assert found.generation_config["eos_token_id"] == [2]
    assert gguf.GGUFReader(out).fields["tokenizer.chat_template"].contents() == "{{ messages[0].content }}"


def test_a_gguf_keeps_its_metadata_and_its_codes(exportable: Callable[[str], Path], tmp_path: Path) -> None:
    first, second, folder = tmp_path / "a.gguf", tmp_path / "b.gguf", tmp_path / "packed"
    run(ExportOptions(model=str(exportable("llama")), quantization="int4-g32", head_type="F16", output=first))
    report = run(ExportOptions(model=str(first), output=second, head_type="F16"))
    assert report.exact == 14
    before, after = gguf.GGUFReader(first), gguf.GGUFReader(second)
    assert {k: f.contents() for k, f in after.fields.items()} == {k: f.contents() for k, f in before.fields.items()}
    assert [(t.name, t.data.tobytes()) for t in after.tensors] == [(t.name, t.data.tobytes()) for t in before.tensors]
    assert run(ExportOptions(model=str(first), format="compressed-tensors", output=folder)).exact == 14
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(open_checkpoint(str(folder)).tensor(name), open_checkpoint(str(first)).tensor(name))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("quantization", ["int4-g32", "int8", "w8a8", "fp8"])
def test_compressed_tensors_in_transformers(
    exportable: Callable[[str], Path], tmp_path: Path, family: str, quantization: str
) -> None:
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    options = ExportOptions(
        model=str(exportable(family)), format="compressed-tensors", quantization=quantization, output=tmp_path / "m"
    )
    run(options)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32).eval()
    with torch.no_grad():
        logits = found(torch.tensor([_TOKENS]), use_cache=False).logits[0].numpy()
    source = CheckpointModel(open_checkpoint(options.model), options.grid)
    expected = _hugging_face(source.config, _decoded(source))
    assert _divergence(expected, logits) < {"w8a8": 5e-3, "fp8": 5e-2}.get(quantization, 1e-6)


def test_a_folder_of_shards(exportable: Callable[[str], Path], tmp_path: Path) -> None:
    """Files, their index, and what transformers needs beside them."""
    from llmc.codegen.export import export_compressed_tensors

    out = tmp_path / "m"
    source = CheckpointModel(open_checkpoint(str(exportable("gemma3"))), Grid(bits=4, group=32))
    report = export_compressed_tensors(out, source, max_shard_bytes=20_000, reopen=lambda path: open_checkpoint(str(path)))
    index = json.loads((out / "model.safetensors.index.json").read_text())
    shards = sorted(file.name for file in out.glob("*.safetensors"))
    assert len(shards) > 2
    assert set(index["weight_map"].values()) == set(shards)
    assert index["metadata"]["total_size"] == sum(report.bytes_by_type.values())
    assert "lm_head.weight" not in index["weight_map"]
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= {
        file.name for file in out.iterdir()
    }
    verdict = is_quantized(out)
    assert verdict.ok
    assert verdict.layer_bits == 4


def test_grids_of_one_model_may_differ(exportable: Callable[[str], Path], tmp_path: Path) -> None:
    class Mixed(CheckpointModel):
        def grid(self, name: str) -> Grid | None:
            if "down_proj" in name or "layers.1.self_attn.v_proj" in name:
                return Grid(bits=8, group=32)
            return None if "o_proj" in name or ".layers." not in name or len(self.shape(name)) != 2 else Grid(bits=4, group=32)

    from llmc.compiler.export import write_compressed_tensors

    report = write_compressed_tensors(tmp_path / "m", Mixed(open_checkpoint(str(exportable("llama")))))
    config = json.loads((tmp_path / "m" / "config.json").read_text())["quantization_config"]
    assert {group["weights"]["num_bits"]: len(group["targets"]) for group in config["config_groups"].values()} == {4: 9, 8: 3}
    assert config["ignore"] == ["lm_head", *(f"model.layers.{i}.self_attn.o_proj" for i in range(2))]
    assert is_quantized(tmp_path / "m").ok
    assert len(report.notes) == 1
    assert report.notes[0].startswith("3 projections, first model.layers.1.self_attn.k_proj.weight, are on another grid")


@pytest.mark.parametrize("format_name", ["gguf", "compressed-tensors"])
def test_what_is_damaged_on_the_way_is_not_kept(
    exportable: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format_name: Any
) -> None:
    """One code of one matrix is written wrongly."""
    if format_name == "gguf":
        pack = gguf_blocks.pack_exact

        def wrong(value: Any, type_name: str) -> np.ndarray:
            blocks = pack(value, type_name)
            blocks[0, 2] ^= 1
            return blocks

        monkeypatch.setattr(gguf_blocks, "pack_exact", wrong)
    else:
        words = packed_codes._pack
        monkeypatch.setattr(packed_codes, "_pack", lambda codes, bits: words(codes ^ (np.arange(codes.shape[1]) == 0), bits))
    options = ExportOptions(model=str(exportable("llama")), format=format_name, quantization="int4-g32", output=tmp_path / "m")
    with pytest.raises(VerificationError, match=r"differs from its codes and scales in \d+ values"):
        run(options)
    assert list(tmp_path.iterdir()) == []


def test_refusals(exportable: Callable[[str], Path], tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    def refused(kind: type[Exception], message: str, **options: Any) -> None:
        values = {"model": str(exportable("llama")), "output": tmp_path / "m", **options}
        with pytest.raises(kind, match=message):
            run(ExportOptions(**values))
        assert not (tmp_path / "m").exists()

    packed = {"format": "compressed-tensors"}
    refused(UsageError, "kernels for 4 and 8 bits", quantization="int3-g32", **packed)
    refused(UsageError, "whole multiples", quantization="int4-g32-asym", **packed)
    refused(UsageError, "in_features=64, not divisible by group size 128", quantization="int4-g128", **packed)
    refused(UsageError, "choose one of Q4_0", type="Q9_9")
    refused(UsageError, "unknown; choose one of int8, w8a8", quantization="int7")
    refused(UsageError, "GGUF has no 'fp8'", quantization="fp8")
    refused(UsageError, "exists", output=exportable("llama"))
    refused(UnsupportedModelError, "phi3", model=str(tiny_checkpoint("phi3")))
    refused(UnsupportedModelError, "no merges", model=str(tiny_checkpoint("llama")))


def test_the_command(exportable: Callable[[str], Path], tmp_path: Path) -> None:
    out = tmp_path / "m.gguf"
    arguments = ["export", str(exportable("llama")), "--type", "Q4_0", "-o", str(out), "--json"]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["tensors"]["Q4_0"] == 14
    assert 0.01 < report["relative_errors"]["Q4_0"] < 0.15
    assert report["output_bytes"] == out.stat().st_size
    again = CliRunner().invoke(main, arguments[:-1])
    assert again.exit_code == 2
    assert "exists" in again.stderr
