"""Calibrated compiles: limits are kept or refused with figures, killed ones go on, and the bundle is what was measured."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llmc
import pytest
from llmc.errors import CapacityError, LlmcError, QualityError, UsageError
from llmc.quantization.report import QuantizationReport
from llmc.quantization.work_folder import Part

SMALL: dict[str, Any] = {"target": "cpu-int4", "cpu_levels": ("native",), "calibration_samples": 12, "calibration_length": 48}


def compiled(checkpoint: Path, output: Path, **options: Any) -> QuantizationReport:
    report = llmc.compile(checkpoint, output=output, **SMALL | options)
    return report.quantization[next(iter(report.targets))]


def test_the_finished_bundle_is_what_was_measured(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    report = compiled(tiny_checkpoint("gemma3"), tmp_path / "m.llmc", method="gptq")
    assert report.quality is not None
    assert report.bundle_quality is not None
    assert report.noise_floor is not None
    assert report.bundle_quality.kl_mean == pytest.approx(report.quality.kl_mean, rel=0.02)
    assert 0 < report.noise_floor.kl_mean < report.quality.kl_mean
    saved = json.loads((tmp_path / "m.llmc" / "report" / "compile.json").read_text())["quantization"]["cpu-int4"]
    assert saved == json.loads(json.dumps(report.as_json()))
    assert [p.name for p in tmp_path.iterdir()] == ["m.llmc"]  # no work folder is left


def test_a_memory_budget_is_kept_or_refused(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint("llama")
    report = compiled(checkpoint, tmp_path / "m.llmc", method="opt-rtn", memory_budget=160_000, num_layers=1)
    assert report.memory_bytes <= 160_000
    assert len({m.format for m in report.matrices()}) > 1  # bits are not spread evenly
    with pytest.raises(QualityError, match=r"--memory-budget 9000: the smallest this model gets is \d+ bytes"):
        compiled(checkpoint, tmp_path / "no.llmc", memory_budget=9000, num_layers=1)
    assert not (tmp_path / "no.llmc").exists()


def test_a_divergence_is_kept_or_refused(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint("llama")
    report = compiled(checkpoint, tmp_path / "m.llmc", method="opt-rtn", max_kl=0.02, num_layers=1)
    assert report.bundle_quality is not None
    assert report.bundle_quality.kl_mean <= 0.02
    assert {m.format for m in report.matrices()} != {"bf16"}  # it does not hide in 16 bits
    with pytest.raises(QualityError, match=r"--max-kl 1e-12: the nearest allocation found has a mean KL of"):
        compiled(checkpoint, tmp_path / "no.llmc", method="opt-rtn", max_kl=1e-12, num_layers=1)
    assert not (tmp_path / "no.llmc").exists()


def test_kv_dtypes_are_chosen_by_measurement(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    options = {"quantization": "bf16", "kv_dtype": "auto", "calibration_length": 96}
    report = compiled(tiny_checkpoint("llama"), tmp_path / "m.llmc", **options)
    assert len(report.kv_layers) == 2
    assert set(report.kv_layers) <= {"int4", "int8", "bf16"}
    assert report.bundle_quality is not None
    assert report.bundle_quality.kl_mean < 0.02
    with pytest.raises(UsageError, match="all layers of a GPU program share one; name a dtype"):
        compiled(tiny_checkpoint("llama"), tmp_path / "g.llmc", **options | {"target": "h100-bf16", "cpu_levels": None})


def test_prefill_may_have_a_precision_of_its_own(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint("llama")
    llmc.compile(checkpoint, target="cpu-bf16", cpu_levels=("native",), output=tmp_path / "bf16")
    made = llmc.compile(
        checkpoint, target="cpu-int4", prefill_quantization="bf16", cpu_levels=("native",), output=tmp_path / "both"
    )
    assert set(made.targets["cpu-int4"].weight_bytes) == {"int4-g32", "int8-g32", "bf16", "vectors"}
    with llmc.load(tmp_path / "bf16") as engine:
        tokens = list(range(5, 25))
        expected = engine.logits(tokens)
    with llmc.load(tmp_path / "both") as engine:
        prefill = engine.logits(tokens)
        single = engine.logits(tokens[:1])
    assert abs(prefill - expected).max() < 0.05 * abs(expected).max()  # all but the head is bf16
    assert abs(single[0] - expected[0]).max() > 2 * abs(prefill[0] - expected[0]).max()  # one token is decoded in int4


def test_a_killed_quantisation_goes_on_and_gives_the_same_bytes(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    checkpoint, whole, killed = tiny_checkpoint("gemma3"), tmp_path / "whole.llmc", tmp_path / "killed.llmc"
    options = {"method": "awq+gptq", "calibration_samples": 10}
    command = [
        *(
            sys.executable,
            "-m",
            "llmc",
            "compile",
            str(checkpoint),
            "--target",
            "cpu-int4",
            "--method",
            "awq+gptq",
            "-o",
            str(killed),
        ),
        *("--calibration-samples", "10", "--calibration-length", "48"),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not list(tmp_path.glob(".killed.llmc.quantized/layer-0001-*.safetensors")):
        assert process.poll() is None, "finished before it could be killed"
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not killed.exists()
    with pytest.raises(UsageError, match=r"was made with method='awq\+gptq', this run has 'gptq'"):
        compiled(checkpoint, killed, **options | {"method": "gptq", "resume": True})
    done = {p.name: p.stat().st_mtime_ns for p in tmp_path.glob(".killed.llmc.quantized/*.safetensors")}
    taken = []
    write = Part.write

    def watched(part: Part, *values: Any) -> None:
        taken.append(part.path.name)
        write(part, *values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Part, "write", watched)
        compiled(checkpoint, killed, **options, resume=True)
    assert done
    assert not set(done) & set(taken)  # finished layers are not made again
    compiled(checkpoint, whole, **options)
    files = {p.relative_to(whole): p.read_bytes() for p in whole.rglob("*") if p.is_file()}
    assert {p.relative_to(killed): p.read_bytes() for p in killed.rglob("*") if p.is_file()} == files
    assert sorted(p.name for p in tmp_path.iterdir()) == ["killed.llmc", "whole.llmc"]


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        ("the same line\n" * 400, "repeated"),
        ("Привет, мир. Это совсем другой язык, которого здесь никто не ждал.\n\n" * 3, "few-samples"),
    ],
)
def test_doubtful_calibration_is_warned_about_by_name(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, text: str, warning: str
) -> None:
    source = tmp_path / "c.txt"
    source.write_text(text)
    report = compiled(tiny_checkpoint("llama"), tmp_path / "m.llmc", method="opt-rtn", calibration=source, num_layers=1)
    assert warning in [w.partition(":")[0] for w in report.warnings]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"method": "gqpt"}, UsageError, "method 'gqpt' is unknown; choose one of rtn, opt-rtn, gptq, autoround"),
        ({"max_kl": 0.0}, UsageError, "max KL is 0.0, expected more than 0 nats"),
        ({"calibration_length": 3}, UsageError, "expected 16 to 32768 tokens"),
        (
            {"method": "gptq", "max_build_memory": 1000},
            CapacityError,
            "--max-build-memory 1000: method gptq on this model takes up to",
        ),
        ({"calibration": "absent.jsonl"}, LlmcError, "absent.jsonl"),
        ({"method": "awq", "target": "cpu-int4,cpu-int8"}, UsageError, "compile one target at a time"),
        ({"quantization": "stored"}, UsageError, "is not quantised; name a format"),
        ({"static_activations": True}, UsageError, "--static-activations: target cpu-int4 rounds no inputs to 8 bits"),
        ({"method": "gptq", "target": "h100-fp8", "cpu_levels": None}, UsageError, "--method gptq: it rounds to integers, and"),
    ],
)
def test_wrong_options_are_one_sentence(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, options: dict[str, Any], error: type[LlmcError], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        compiled(tiny_checkpoint("llama"), tmp_path / "m.llmc", **options)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())
