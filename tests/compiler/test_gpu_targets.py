"""Compiling for GPUs: several targets in one bundle, weights shared, what the report says, and refusals in one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llmc
import pytest
from llmc.codegen.triton import backend as gpu_backend
from llmc.compiler.inspection import open_inspection
from llmc.errors import BundleError, MissingExtraError, TargetError, UsageError
from llmc.runtime.program import GpuProgram, decode_program
from llmc.runtime.verification import verify_bundle
from llmc.targets import resolve_target

TARGETS = ("h100-fp8", "a100-int8", "rtx4090-fp8", "mi300x-fp8", "cpu-bf16")
CONFIGS = Path(__file__).parent.parent.parent / "examples" / "configs"


@pytest.fixture(scope="module")
def bundle(tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of `TARGETS` in one bundle of a tiny Llama."""
    out = tmp_path_factory.mktemp("several") / "model.llmc"
    llmc.compile(tiny_checkpoint("llama"), target=",".join(t for t in TARGETS), max_tokens=16, output=out)
    return out


def _program(bundle: Path, target: str) -> GpuProgram:
    path = bundle / "programs" / target / "program.json"
    program = decode_program(path.read_bytes(), str(path))
    assert isinstance(program, GpuProgram)
    return program


def test_targets_share_what_they_store_alike(bundle: Path) -> None:
    manifest = json.loads((bundle / "manifest.json").read_text())
    files = {entry["name"]: entry["weights"] for entry in manifest["targets"]}
    assert set(files) == set(TARGETS)
    shared = "weights/h100-fp8+a100-int8+rtx4090-fp8+mi300x-fp8.safetensors"  # embedding, head, norms
    fp8 = "weights/h100-fp8+rtx4090-fp8.safetensors"
    assert files["h100-fp8"] == files["rtx4090-fp8"] == [shared, fp8]
    assert files["a100-int8"] == [shared, "weights/a100-int8.safetensors"]
    assert files["mi300x-fp8"] == [shared, "weights/mi300x-fp8.safetensors"]  # another 8-bit float
    assert files["cpu-bf16"] == ["weights/cpu-bf16.safetensors"]  # another layout
    assert {name for names in files.values() for name in names} == {
        name for name in manifest["files"] if name.startswith("weights/")
    }


def test_verify_and_inspect_show_every_kernel(bundle: Path) -> None:
    assert verify_bundle(bundle).problems == []
    inspection = open_inspection(bundle, "mi300x-fp8")
    tables = inspection.kernels()
    assert set(tables) == set(TARGETS) - {"cpu-bf16"}
    archs = {"h100-fp8": "sm_90", "a100-int8": "sm_80", "rtx4090-fp8": "sm_89", "mi300x-fp8": "gfx942"}
    for target, kernels in tables.items():
        assert {kernel["phase"] for kernel in kernels} == {"decode-1", "decode-4", "decode-16", "prefill", "sampling"}
        for kernel in kernels:
            assert kernel["arch"] == archs[target]
            assert kernel["spill_bytes"] == 0
            assert kernel["registers"] > 0
            assert kernel["shared_bytes"] <= (resolve_target(target).device.shared_memory_per_block_bytes or 0)
            assert kernel["bytes"] > 0
            assert kernel["floor_us"] >= 0
        products = [k for k in kernels if k["kernel"].startswith("linear")]
        assert products
        assert all(kernel["matrix_instructions"] for kernel in products)
    assert inspection.passes[-1]["name"] == "plan-memory"
    assert "'fp8-fnuz'" in inspection.graph("quantize")


def test_sources_are_beside_the_binaries_and_readable(bundle: Path) -> None:
    folder = bundle / "programs" / "h100-fp8"
    for name, kernel in _program(bundle, "h100-fp8").kernels.items():
        source = (folder / kernel.source).read_text()
        assert source.startswith('"""')
        assert f"def {name}(" in source
        assert "{{" not in source
        assert (folder / kernel.binary).read_bytes()[:4] == b"\x7fELF"
        assert max(len(line) for line in source.splitlines()) < 200


def test_the_same_inputs_give_the_same_bytes(bundle: Path, tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Another process order, the cache cold: one target again, alone."""
    again = tmp_path / "again.llmc"
    llmc.compile(tiny_checkpoint("llama"), target="h100-fp8", max_tokens=16, output=again)
    names = [p.relative_to(bundle).as_posix() for p in sorted((bundle / "programs" / "h100-fp8").rglob("*")) if p.is_file()]
    assert len(names) > 20
    assert [name for name in names if (bundle / name).read_bytes() != (again / name).read_bytes()] == []


def test_arena_ranges_of_prefill_and_decode_are_apart(bundle: Path) -> None:
    """They may run at the same time."""
    program = _program(bundle, "h100-fp8")
    offsets: dict[bool, set[int]] = {True: set(), False: set()}
    for phase in program.phases:
        for call in phase.calls:
            offsets[phase.single_token] |= {int(a.value) for a in call.arguments if a.kind == "arena"}
    assert not offsets[True] & offsets[False]


@pytest.mark.parametrize(
    ("target", "options", "error", "message"),
    [
        ("a100-fp8", {}, TargetError, "device 'a100' has no scheme 'fp8'; it has bf16, int8, int4"),
        ("a100-bf16", {"quantization": "fp8"}, TargetError, "device 'a100' does not run 'fp8'; it runs bf16, int8, int4"),
        ("a100-bf16", {"kv_dtype": "fp8"}, UsageError, "KV dtype 'fp8' is not to be had on a100; choose bf16, int8"),
        ("h100-bf16", {"kv_dtype": "f32"}, UsageError, "KV dtype 'f32' is not to be had on h100; choose bf16, fp8, int8"),
        ("h100-int8", {"quantization": "int8-channel"}, TargetError, "'int8-channel' has no GPU kernels; there are bf16, fp8"),
        ("h100-bf16", {"cpu_levels": ("native",)}, UsageError, "has no CPU levels"),
        ("h100-bf16,h100-bf16", {}, TargetError, "target 'h100-bf16' is given twice"),
        ("h100-bf16,", {}, TargetError, "unknown target ''"),
    ],
)
def test_refusals(
    tiny_checkpoint: Callable[..., Path], target: str, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        llmc.compile(tiny_checkpoint("llama"), target=target, dry_run=True, **options)
    assert "\n" not in str(caught.value)


def test_a_model_that_does_not_fit_is_refused_with_what_would(tmp_path: Path) -> None:
    config = json.loads((CONFIGS / "llama-3.1-8b.json").read_text())
    (tmp_path / "c.json").write_text(json.dumps(config | {"num_hidden_layers": 60}))
    with pytest.raises(TargetError) as caught:
        llmc.compile(tmp_path / "c.json", target="rtx4090-bf16", dry_run=True)
    text = str(caught.value)
    assert "needs 28.3 GB for weights" in text
    assert "rtx4090 has 23.7 GB to use; choose a narrower scheme (fp8, int8, int4) or a larger device (a100, b200, h100" in text
    assert "\n" not in text


def test_a_device_of_ones_own(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    text = (Path(llmc.__file__).parent / "targets" / "devices" / "l40s.toml").read_text()
    own = tmp_path / "l4.toml"
    own.write_text(text.replace('"l40s"', '"l4"').replace("num_processors = 142", "num_processors = 58"))
    out = tmp_path / "own.llmc"
    llmc.compile(tiny_checkpoint("qwen2"), target=str(own), max_tokens=16, output=out)
    assert _program(out, "l4-fp8").machine == "sm_89"
    own.write_text("\n".join(line for line in text.splitlines() if not line.startswith("num_processors")))
    with pytest.raises(TargetError, match="gives no num_processors; add it"):
        llmc.compile(tiny_checkpoint("qwen2"), target=str(own), dry_run=True)


def test_missing_triton_is_one_sentence(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_backend.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        MissingExtraError, match=r"needs the package 'triton'.*pip install 'llmc\[compile\]', or choose a cpu target"
    ):
        llmc.compile(tiny_checkpoint("llama"), target="h100-bf16", output=tmp_path / "x.llmc")
    assert not (tmp_path / "x.llmc").exists()


def test_without_a_driver_the_cpu_target_is_chosen_or_the_way_out_named(bundle: Path) -> None:
    """On a machine with a GPU this bundle would run on it."""
    from llmc.runtime.devices import survey_cuda

    if survey_cuda().devices:
        pytest.skip("this machine has a GPU")
    with llmc.load(bundle) as engine:
        assert engine.target_choice.startswith("target cpu-bf16 on ")
        assert "h100-fp8: is for an NVIDIA GPU, but" in engine.target_choice
    with pytest.raises(BundleError, match=r"target 'h100-fp8' is for an NVIDIA GPU, but .*interpreter") as caught:
        llmc.load(bundle, target="h100-fp8")
    assert "\n" not in str(caught.value)
