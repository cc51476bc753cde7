"""quantizer: methods lose less than rounding, scales leave the float model alone, and parts on disk replace the work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llmc.codegen.cpu.formats import decode_matrix
from llmc.errors import UsageError
from llmc.passes.dialect import LINEARS
from llmc.passes.graph import calls
from llmc.quantization.layerwise import Forward, linear_weight
from llmc.quantization.method import Method
from llmc.quantization.probe import Probe
from llmc.quantization.quality import Quality
from llmc.quantization.quantized_model import QuantizedModel
from llmc.quantization.quantizer import Quantizer
from llmc.quantization.work_folder import WorkFolder


def make_quantizer(s: Any, formats: dict[str, str], method: str, samples: Any, work: WorkFolder, **options: Any) -> Quantizer:
    return Quantizer(
        s.module,
        formats,
        Method.parse(method),
        samples,
        sources=s.store,
        read=s.store.read,
        decode=decode_matrix,
        work=work,
        strength=0.8,
        **options,
    )


def quantize(setup: Any, method: str, folder: Path, *, resume: bool = False, **formats: str) -> tuple[QuantizedModel, Quality]:
    s = setup("gemma3") if callable(setup) else setup
    probe = Probe.make(s.module, s.steps, s.samples[:3], s.read)
    chosen = {name: formats.get(name.rpartition(".")[0].rpartition(".")[2], "int4-g32") for name in s.matrices()}
    quantizer = make_quantizer(s, chosen, method, s.samples[3:], WorkFolder(folder, {"method": method}, resume=resume))
    model = quantizer.run()
    forward = Forward(quantizer.module, quantizer.steps, probe.samples)
    return model, probe.compare(probe.finish(forward, 0, quantizer.read))


@pytest.mark.parametrize(
    ("architecture_", "method"),
    [("llama", "gptq"), ("gemma3", "gptq"), ("gemma3", "awq+gptq"), ("llama", "opt-rtn"), ("llama", "autoround")],
)
def test_methods_beat_rounding_to_nearest(setup: Callable[..., Any], architecture_: str, method: str, tmp_path: Path) -> None:
    plain = quantize(setup(architecture_, samples=35, length=60), "rtn", tmp_path / "rtn")[1]
    model, quality = quantize(setup(architecture_, samples=35, length=60), method, tmp_path / "m")
    assert quality.kl_mean < plain.kl_mean
    assert len(model.records) == len(model.parts) == 4 * (3 if architecture_ == "gemma3" else 2) + 1
    assert (len(model.rescaling) > 0) == method.startswith("awq")


def test_finished_layers_are_taken_from_disk(setup: Callable[..., Any], tmp_path: Path) -> None:
    first, quality = quantize(setup, "awq+gptq", tmp_path / "w")
    files = {p.name: p.read_bytes() for p in (tmp_path / "w").iterdir()}
    last = sorted(name for name in files if name.startswith("layer"))[1:]
    for name in last:
        (tmp_path / "w" / name).unlink()
    again, same = quantize(setup, "awq+gptq", tmp_path / "w", resume=True)
    assert {p.name: p.read_bytes() for p in (tmp_path / "w").iterdir()} == files
    assert same == quality
    assert [r.name for r in again.records] == [r.name for r in first.records]
    assert again.rescaling.keys() == first.rescaling.keys()


def test_formats_without_a_grid_are_decoded_and_others_stay(setup: Callable[..., Any], tmp_path: Path) -> None:
    model, quality = quantize(setup, "gptq", tmp_path / "w", down_proj="bf16", o_proj="f32", embed_tokens="int8-g32")
    formats = {r.name.rpartition(".")[0].rpartition(".")[2]: r.format for r in model.records}
    assert formats == {
        "qkv_proj": "int4-g32", "o_proj": "f32", "gate_up_proj": "int4-g32", "down_proj": "bf16", "embed_tokens": "int8-g32"
    }  # fmt: skip
    assert model.matrix("model.layers.0.mlp.down_proj.weight") is None
    assert quality.kl_mean > 0


def test_static_inputs_have_a_step_each_and_survive_a_resume(setup: Callable[..., Any], tmp_path: Path) -> None:
    """Inputs of one value share a step; the graph ends up with them, so that what is measured is what they do."""
    found = []
    for resume in (False, True):
        s = setup("llama")
        work = WorkFolder(tmp_path / "w", {}, resume=resume)
        quantizer = make_quantizer(s, dict.fromkeys(s.matrices(), "w8a8"), "rtn", s.samples, work, static_inputs=True)
        model = quantizer.run()
        steps = {record.name: record.input_step for record in model.records}
        assert all(step is not None and step > 0 for step in steps.values())
        assert len(set(steps.values())) == len(steps)
        formats = {linear_weight(node): node.args[-1] for node in calls(s.module, *LINEARS)}
        assert formats == {name: f"w8a8-static{step:.9g}" for name, step in steps.items()} == quantizer.formats
        found.append(formats)
        for path in list((tmp_path / "w").glob("layer-0002*")):
            path.unlink()
    assert found[0] == found[1]


def test_logits_are_never_computed_for_all_tokens(
    setup: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would take gigabytes: a vocabulary for each of tens of thousands of tokens."""
    s = setup("gemma3")
    ran: list[int] = []
    run = Forward.run
    monkeypatch.setattr(Forward, "run", lambda self, step, *rest: (ran.append(self.steps.index(step)), run(self, step, *rest)))
    work = WorkFolder(tmp_path / "w", {}, resume=False)
    make_quantizer(s, dict.fromkeys(s.matrices(), "int4-g32"), "awq+gptq", s.samples, work).run()
    assert max(ran) == len(s.steps) - 2


def test_unknown_methods_list_the_known() -> None:
    with pytest.raises(
        UsageError, match="'gptq\\+awq' is unknown; choose one of rtn, opt-rtn, gptq, autoround, or awq or smoothquant"
    ):
        Method.parse("gptq+awq")
    assert [str(Method.parse(name)) for name in ("awq", "smoothquant+rtn", "gptq")] == [
        "awq+opt-rtn",
        "smoothquant+rtn",
        "gptq",
    ]
