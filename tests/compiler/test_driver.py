"""Compiling: reproducible bytes, dumps, verification that finds a broken pass, and nothing left behind by failures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llmc
import pytest
import torch
from llmc.codegen import bundle_writer
from llmc.errors import CheckpointError, TargetError, UsageError, VerificationError
from llmc.passes.fuse_rope import FuseRope


def _files(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_the_same_inputs_give_the_same_bytes(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        monkeypatch.setenv("LLMC_CACHE", str(tmp_path / f"cache-{name}"))  # built afresh each time
        llmc.compile(tiny_checkpoint("qwen3"), target="cpu-int8", cpu_levels=("native",), output=tmp_path / name)
    first, second = _files(tmp_path / "a"), _files(tmp_path / "b")
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []
    assert not any(str(tmp_path).encode() in data for data in first.values())


def test_dumps_are_reproducible_and_only_where_the_graph_changed(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    for name in ("a", "b", "b"):  # a dump replaces an earlier one
        llmc.compile(tiny_checkpoint("phi3"), target="cpu-f32", dry_run=True, dump_ir=tmp_path / name)
    assert _files(tmp_path / "a") == _files(tmp_path / "b")
    log = json.loads((tmp_path / "a" / "passes.json").read_text())
    dumps = {p.stem for p in (tmp_path / "a").glob("*.txt")}
    changed = {f"{i:03}_{entry['name']}" for i, entry in enumerate(log, 1) if entry["changed"]}
    assert dumps == changed | {"000_traced"}
    assert "fuse-qkv" in {entry["name"] for entry in log if not entry["changed"]}  # Phi-3 stores it fused


@pytest.mark.parametrize("quantization", ["f32", "int8"])
def test_verify_each_accepts_every_pass(tiny_checkpoint: Callable[..., Path], architecture: str, quantization: str) -> None:
    report = llmc.compile(
        tiny_checkpoint(architecture), target="cpu-int8", quantization=quantization, verify_each=1e-4, dry_run=True
    )
    errors = next(iter(report.targets.values())).verify_errors
    assert set(errors) >= {"canonicalise", "fuse-rope", "insert-kv-cache", "split-phases"}
    lossless = {name: error for name, error in errors.items() if name not in ("quantize", "quantize-kv")}
    assert max(lossless.values()) < 1e-4
    assert (errors.get("quantize", 0.0) > 1e-4) == (quantization == "int8")


def test_verify_each_names_the_pass_that_breaks_the_numbers(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = FuseRope.run

    def broken(self: FuseRope, module: torch.fx.GraphModule) -> Any:
        result = honest(self, module)
        rope = next(n for n in module.graph.nodes if n.target is torch.ops.llmc.rope.default)
        rope.args = (*rope.args[:3], 1.01)
        return result

    monkeypatch.setattr(FuseRope, "run", broken)
    with pytest.raises(VerificationError, match=r"fuse-rope changed the logits: relative error .* tolerance 1e-04"):
        llmc.compile(tiny_checkpoint("llama"), target="cpu-f32", verify_each=1e-4, dry_run=True)


def test_stop_after_leaves_no_bundle(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    report = llmc.compile(tiny_checkpoint("llama"), target="cpu-f32", stop_after="fuse-qkv", output=tmp_path / "x.llmc")
    assert [r.name for r in report.targets["cpu-f32"].passes][-1] == "fuse-qkv"
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UsageError, match="no pass is called 'fuse-everything'"):
        llmc.compile(tiny_checkpoint("llama"), target="cpu-f32", stop_after="fuse-everything")


def test_num_layers(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "one.llmc"
    llmc.compile(tiny_checkpoint("gemma3"), target="cpu-f32", num_layers=1, cpu_levels=("native",), output=out)
    program = json.loads((out / "programs" / "cpu-f32" / "program.json").read_text())
    assert program["kv_cache"]["num_layers"] == 1
    with llmc.load(out) as engine:
        assert engine.generate([1, 2, 3], llmc.SamplingParams(max_tokens=3, ignore_eos=True)).token_ids
    with pytest.raises(UsageError, match="the model has 3 layers"):
        llmc.compile(tiny_checkpoint("gemma3"), target="cpu-f32", num_layers=4)


def test_an_output_that_is_not_a_bundle_is_not_touched(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="exists and is not a bundle"):
        llmc.compile(tiny_checkpoint("llama"), target="cpu-f32", output=tmp_path / "precious")
    assert (tmp_path / "precious" / "notes.txt").read_text() == "mine"


def test_a_folder_of_somebody_else_is_not_touched(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """A manifest.json does not make a bundle, and a bundle may have got company."""
    extension = tmp_path / "extension"
    extension.mkdir()
    (extension / "manifest.json").write_text('{"name": "a browser extension"}')
    out = tmp_path / "m.llmc"
    llmc.compile(tiny_checkpoint("llama"), target="cpu-f32", cpu_levels=("native",), output=out)
    (out / "notes.txt").write_text("mine")
    for folder, message in ((extension, "exists and is not a bundle"), (out, r"holds 'notes\.txt', which is not part")):
        before = _files(folder)
        with pytest.raises(UsageError, match=message):
            llmc.compile(tiny_checkpoint("llama"), target="cpu-f32", cpu_levels=("native",), output=folder)
        assert _files(folder) == before
        assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("exchange", [True, False])
def test_replacing_a_bundle_never_loses_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool) -> None:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "which").write_text(name)
    honest = Path.rename

    def rename(self: Path, target: Path) -> Path:
        if self.name == "new":
            raise KeyboardInterrupt
        return honest(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    if not exchange:
        monkeypatch.setattr(bundle_writer, "_exchange", lambda a, b: False)
    with pytest.raises(KeyboardInterrupt):
        bundle_writer._replace(tmp_path / "new", tmp_path / "old")
    assert (tmp_path / "old" / "which").read_text() == ("new" if exchange else "old")


def test_a_bundle_taken_away_by_a_killed_compile_comes_back(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "m.llmc"
    llmc.compile(tiny_checkpoint("llama"), target="cpu-f32", cpu_levels=("native",), output=out)
    before = _files(out)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    out.rename(tmp_path / f".m.llmc.partial-{dead.pid}-x-old")
    (tmp_path / f".m.llmc.partial-{dead.pid}-x").mkdir()
    with bundle_writer.BundleWriter(out):
        assert _files(out) == before
    assert [p.name for p in tmp_path.iterdir()] == ["m.llmc"]


def test_a_bundle_compiled_again_at_the_same_path_runs_its_new_code(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    def logits(architecture: str, out: Path) -> Any:
        llmc.compile(tiny_checkpoint(architecture), target="cpu-f32", cpu_levels=("native",), output=out)
        with llmc.load(out) as engine:
            return engine.logits([5, 6, 7, 8])

    logits("llama", tmp_path / "same")
    assert (logits("qwen3", tmp_path / "same") == logits("qwen3", tmp_path / "elsewhere")).all()


def test_weights_that_are_not_numbers_are_refused(tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 4] = float("nan")
    model.save_pretrained(tmp_path / "nan")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj\.weight holds NaN"):
        llmc.compile(tmp_path / "nan", target="cpu-int8", cpu_levels=("native",), output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_dump_folder_with_other_files_is_not_touched(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "001_thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"holds '001_thesis\.txt', expected an empty folder or an earlier dump"):
        llmc.compile(tiny_checkpoint("llama"), target="cpu-f32", dry_run=True, dump_ir=tmp_path)
    assert _files(tmp_path) == {"001_thesis.txt": b"mine"}


def test_a_failure_in_the_middle_keeps_the_old_bundle(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "m.llmc"
    llmc.compile(tiny_checkpoint("llama"), target="cpu-f32", cpu_levels=("native",), output=out)
    before = _files(out)

    def fail(*_: object) -> None:
        raise CheckpointError("disk on fire")

    monkeypatch.setattr("llmc.compiler.driver.write_model_files", fail)
    with pytest.raises(CheckpointError):
        llmc.compile(tiny_checkpoint("llama"), target="cpu-int8", cpu_levels=("native",), output=out)
    assert _files(out) == before
    assert [p.name for p in tmp_path.iterdir()] == ["m.llmc"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_kill_in_the_middle_leaves_no_bundle(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, number: signal.Signals
) -> None:
    out = tmp_path / "killed.llmc"
    environment = os.environ | {"LLMC_CACHE": str(tmp_path / "cache")}  # nothing cached: the compiler runs for seconds
    command = [sys.executable, "-m", "llmc", "compile", str(tiny_checkpoint("llama")), "--target", "cpu-int8", "-o", str(out)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (partial := list(tmp_path.glob(".killed.llmc.partial-*"))):
        assert process.poll() is None, "finished before it could be killed"
        time.sleep(0.01)
    process.send_signal(number)
    process.wait()
    assert not out.exists()
    assert partial[0].exists() == (number == signal.SIGKILL)  # the others clean up after themselves
    llmc.compile(tiny_checkpoint("llama"), target="cpu-int8", cpu_levels=("native",), output=out)
    assert out.is_dir()
    assert not partial[0].exists()  # the next compile cleans up


def test_unknown_options_are_refused(tiny_checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(UsageError, match="unknown option 'quantisation'"):
        llmc.compile(tiny_checkpoint("llama"), target="cpu-f32", quantisation="int8")
    with pytest.raises(TargetError, match="does not run 'int9'; it runs f32, bf16, fp16, int8, int6, int5, int4, int3"):
        llmc.compile(tiny_checkpoint("llama"), target="cpu-f32", quantization="int9")


def test_weights_of_another_config_are_refused(tiny_checkpoint: Callable[..., Path], tiny_config: Any, tmp_path: Path) -> None:
    tiny_config("llama", intermediate_size=128).to_json_file(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match=r"mlp.*128"):
        llmc.compile(tiny_checkpoint("llama"), target="cpu-f32", config=tmp_path / "config.json", output=tmp_path / "x")
