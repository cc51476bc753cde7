"""Exports after calibrated quantisation: codes of the quantiser, norms and biases rescaled to fit, in files that others and we read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import llmc
import pytest
import torch
from llmc.compiler.export import ExportOptions, run
from llmc.compiler.options import QuantizationOptions
from llmc.errors import UsageError

FEW: dict[str, Any] = {"calibration_samples": 12, "calibration_length": 48}


@pytest.mark.parametrize(("format_name", "quantization"), [("gguf", None), ("compressed-tensors", "int4-g32")])
def test_the_exported_model_is_the_quantised_one(
    exportable: Callable[[str], Path], tmp_path: Path, format_name: Any, quantization: str | None
) -> None:
    """qwen2 has biases, which AWQ divides; what we read back is as far from the float model as the report says."""
    checkpoint, out = exportable("qwen2"), tmp_path / ("m.gguf" if format_name == "gguf" else "m")
    options = QuantizationOptions(method="awq+gptq", **FEW)
    report = run(
        ExportOptions(model=str(checkpoint), format=format_name, quantization=quantization, output=out, quantize=options)
    )
    assert report.exact >= 2 * 7
    assert report.quantization is not None
    assert report.quantization.quality is not None
    assert not list(tmp_path.glob(".*"))
    tokens = list(range(5, 45))
    logits = []
    for model in (checkpoint, out):
        llmc.compile(model, target="cpu-f32", quantization="f32", cpu_levels=("native",), output=tmp_path / "b.llmc")
        with llmc.load(tmp_path / "b.llmc") as engine:
            logits.append(torch.from_numpy(engine.logits(tokens)).log_softmax(-1))
    kl = torch.nn.functional.kl_div(logits[1], logits[0], reduction="batchmean", log_target=True)
    assert 0 < kl < 4 * report.quantization.quality.kl_mean


@pytest.mark.parametrize(
    ("quantization", "method", "static"), [("w8a8", "gptq", True), ("w8a8", "smoothquant+gptq", False), ("fp8", "rtn", True)]
)
def test_activations_of_8_bits_in_transformers(
    exportable: Callable[[str], Path], tmp_path: Path, quantization: str, method: str, static: bool
) -> None:
    """What transformers computes is as far from the float model as the graph was that the quantiser measured."""
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    options = ExportOptions(
        model=str(exportable("llama")),
        format="compressed-tensors",
        quantization=quantization,
        output=tmp_path / "m",
        quantize=QuantizationOptions(method=method, static_activations=static, **FEW),
    )
    report = run(options)
    tokens = torch.arange(5, 45)[None]
    logits = []
    for path in (options.model, str(tmp_path / "m")):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        with torch.no_grad():
            logits.append(model(tokens, use_cache=False).logits[0].log_softmax(-1))
    scales = [value for name, value in model.named_parameters() if name.endswith("input_scale")]
    assert len(scales) == (14 if static else 0)
    kl = torch.nn.functional.kl_div(logits[1], logits[0], reduction="batchmean", log_target=True)
    assert report.quantization is not None
    assert report.quantization.quality is not None
    assert 0.2 * report.quantization.quality.kl_mean < kl < 5 * report.quantization.quality.kl_mean


def test_types_without_a_grid_are_refused(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    for options, message in (
        ({"type": "Q4_K"}, "--type Q4_K is on no grid that --method can aim at; choose Q4_0, Q5_0 or Q8_0"),
        ({"format": "compressed-tensors", "quantization": "fp8"}, "--method gptq: it rounds to integers, and target h100-fp8"),
    ):
        values: dict[str, Any] = {"model": str(tiny_checkpoint("llama")), "output": tmp_path / "m", **options}
        with pytest.raises(UsageError, match=message):
            run(ExportOptions(**values, quantize=QuantizationOptions(method="gptq")))
    assert not list(tmp_path.iterdir())


def test_a_quantised_checkpoint_is_compiled_with_its_codes(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    exported = tmp_path / "int4"
    run(
        ExportOptions(
            model=str(tiny_checkpoint("llama")), format="compressed-tensors", quantization="int4-g32", output=exported
        )
    )
    kept = llmc.compile(exported, target="cpu-int8", cpu_levels=("native",), output=tmp_path / "kept.llmc")
    assert set(kept.targets["cpu-int8"].weight_bytes) == {"int4-g32", "int8-g32", "vectors"}
    assert any("keep the codes they are stored in" in note for note in kept.notes)
    converted = llmc.compile(
        exported, target="cpu-int8", quantization="f32", cpu_levels=("native",), output=tmp_path / "f32.llmc"
    )
    assert set(converted.targets["cpu-f32"].weight_bytes) == {"f32", "vectors"}
    tokens = list(range(5, 45))
    with llmc.load(tmp_path / "kept.llmc") as a, llmc.load(tmp_path / "f32.llmc") as b:
        x, y = a.logits(tokens), b.logits(tokens)
    assert abs(x - y).max() < 0.06 * abs(y).max()  # embedding and head alone are rounded anew, to 8 bits
