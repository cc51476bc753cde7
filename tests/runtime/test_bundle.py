"""Damaged, incomplete, hostile and foreign bundles: each refused in one sentence that says what and where."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llmc
import pytest
from llmc.errors import BundleError, RequestError, UsageError
from llmc.runtime import Bundle
from llmc.runtime.devices import CudaSurvey
from llmc.runtime.verification import verify_bundle

WEIGHTS = "weights/cpu-f32.safetensors"
PROGRAM = "programs/cpu-f32/program.json"
LIBRARY = "programs/cpu-f32/libportable.so"


@pytest.fixture
def bundle(toy_bundle: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return shutil.copytree(toy_bundle, tmp_path / "b.llmc")


def edit_manifest(bundle: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    path = bundle / "manifest.json"
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))


def refused(bundle: Path, *texts: str, load: Callable[[Path], object] = llmc.load) -> None:
    with pytest.raises(BundleError) as caught:
        load(bundle)
    message = str(caught.value)
    assert "\n" not in message
    for text in texts:
        assert text in message, message


def test_a_good_bundle_opens_and_moves(bundle: Path, tmp_path: Path) -> None:
    with llmc.load(bundle) as engine:
        expected = engine.generate([5, 6]).token_ids
    moved = bundle.rename(tmp_path / "elsewhere")
    for path in [moved, *moved.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    with llmc.load(moved) as engine:
        assert engine.generate([5, 6]).token_ids == expected
    for path in [moved, *moved.rglob("*")]:
        path.chmod(0o755)


@pytest.mark.parametrize("name", [WEIGHTS, LIBRARY, PROGRAM, "tokenizer.json", "config.json", "chat_template.jinja"])
@pytest.mark.parametrize("place", [0, 0.5, 1])
def test_one_flipped_bit(bundle: Path, name: str, place: float) -> None:
    data = bytearray((bundle / name).read_bytes())
    data[int(place * (len(data) - 1))] ^= 4
    (bundle / name).write_bytes(data)
    refused(bundle, str(bundle / name), "SHA-256 is", "but the manifest says", "copy the bundle again")


@pytest.mark.parametrize("name", [WEIGHTS, LIBRARY, PROGRAM, "tokenizer.json", "generation_config.json"])
def test_a_missing_or_short_file(bundle: Path, name: str) -> None:
    size = (bundle / name).stat().st_size
    os.truncate(bundle / name, size - 1)
    refused(bundle, str(bundle / name), f"{size - 1} bytes, but the manifest says {size}")
    (bundle / name).unlink()
    refused(bundle, str(bundle / name), "No such file", "copy the bundle again")


def test_not_a_bundle(tmp_path: Path) -> None:
    refused(tmp_path, "not a bundle", "holds no manifest.json")
    refused(tmp_path / "nowhere", "found nothing there")
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file", "found a file there")
    (tmp_path / "manifest.json").mkdir()
    refused(tmp_path, "not a bundle")


@pytest.mark.parametrize(
    "text", ["", "[]", "7", "{", "\xff", '{"schema_version": 1}', "[" * 100_000, '{"schema_version": "1"}', "null"]
)
def test_a_manifest_that_is_none(bundle: Path, text: str) -> None:
    (bundle / "manifest.json").write_bytes(text.encode("latin-1"))
    refused(bundle, str(bundle / "manifest.json"), "not a manifest")


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        (["files", "config.json", "size"], -1, "size"),
        (["files", "config.json", "size"], 1.5, "size"),
        (["files", "config.json", "size"], "12", "size"),
        (["files", "config.json", "size"], 10**30, "size"),
        (["files", "config.json", "size"], 2**62, f"but the manifest says {2**62}"),
        (["files", "config.json", "sha256"], "abc", "sha256"),
        (["files", "config.json", "sha256"], "A" * 64, "sha256"),
        (["files"], [], "files"),
        (["targets"], [], "targets"),
        (["targets", 0, "program"], None, "program"),
        (["targets", 0, "program"], "../program.json", "which is not in files"),
        (["targets", 0, "weights"], "config.txt", "weights"),
        (["targets", 0, "weights"], [], "weights"),
        (["targets", 0, "weights"], ["config.txt"], "which is not in files"),
        (["targets", 0, "weights"], [WEIGHTS, WEIGHTS], "lists a weight file twice"),
        (["targets", 0, "weights"], ["config.json", WEIGHTS], "config.json: the header claims"),
        (["targets", 0, "name"], "cpu-int8", "target is 'cpu-f32', but the manifest lists it as 'cpu-int8'"),
        (["model"], None, "model"),
        (["schema_version"], 3, "schema_version is 3, this llmc"),
        (["schema_version"], 1, "schema_version is 1, this llmc 0.1.0 reads 2; compile the bundle again"),
        (["min_runtime"], "99.0.0", "needs llmc 99.0.0 or newer"),
        (["min_runtime"], "newest", "is not of the form 1.2.3"),
    ],
)
def test_wrong_values_in_the_manifest(bundle: Path, path: list[str | int], value: object, text: str) -> None:
    def edit(data: Any) -> None:
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = value

    edit_manifest(bundle, edit)
    refused(bundle, text)


def test_a_newer_schema_is_called_newer_even_if_its_fields_differ(bundle: Path) -> None:
    (bundle / "manifest.json").write_text('{"schema_version": 7, "min_runtime": "9.1", "everything": "else"}')
    refused(bundle, "schema_version is 7", "reads up to 2", "upgrade llmc")


def test_unknown_fields_and_unlisted_files_are_ignored(bundle: Path) -> None:
    edit_manifest(bundle, lambda data: data.update(future={"a": 1}))
    (bundle / "notes.txt").write_text("not named")
    with llmc.load(bundle) as engine:
        assert engine.generate([5])
    assert verify_bundle(bundle).extra_files == ["notes.txt"]


@pytest.mark.parametrize("name", ["/etc/passwd", "../secret", "a/../../secret", "a//b", "", "a\\b", "./config.json", "a\0b"])
def test_paths_that_leave_the_bundle(bundle: Path, name: str) -> None:
    (bundle.parent / "secret").write_text("secret")
    edit_manifest(bundle, lambda data: data["files"].update({name: {"size": 6, "sha256": "0" * 64}}))
    refused(bundle, "may not be absolute or hold")


def test_links(bundle: Path) -> None:
    """A link within the bundle is fine; one that leads out, a loop and a pipe are not."""
    config = bundle / "config.json"
    config.rename(bundle / "real.json")
    config.symlink_to("real.json")
    with llmc.load(bundle):
        pass
    outside = (bundle / "real.json").rename(bundle.parent / "outside.json")
    config.unlink()
    config.symlink_to(outside)
    refused(bundle, "a link that leads out of the bundle", "outside.json")
    config.unlink()
    config.symlink_to("config.json")
    refused(bundle, str(config))
    config.unlink()
    os.mkfifo(config)
    refused(bundle, "not a regular file")


def test_a_linked_folder_that_leads_out(bundle: Path) -> None:
    (bundle / "weights").rename(bundle.parent / "weights")
    (bundle / "weights").symlink_to(bundle.parent / "weights")
    refused(bundle, "a link that leads out of the bundle")


def phase(name: str, **changes: object) -> dict[str, object]:
    return {"name": name, "max_tokens": 32, "single_token": False, "calls": [], **changes}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"abi_version": 3}, "abi_version is 3, this runtime calls 2; upgrade llmc"),
        ({"abi_version": 1}, "abi_version is 1, this runtime calls 2; compile the bundle again"),
        ({"abi_version": "1"}, "not a program description"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"vocab_size": 2**40}, "vocab_size"),
        ({"arena_bytes": -64}, "arena_bytes"),
        ({"arena_bytes": 10**40}, "arena_bytes"),
        ({"libraries": {}}, "no 'portable' library"),
        ({"libraries": {"portable": "../../../libportable.so"}}, "may not be absolute"),
        ({"libraries": {"portable": "/lib/libc.so.6"}}, "may not be absolute"),
        ({"libraries": {"portable": "other.so"}}, "'other.so' is not among the manifest's files"),
        ({"libraries": {"portable": "libportable.so", "sse9": "x.so"}}, "unknown library levels ['sse9']"),
        ({"phases": []}, "phases"),
        ({"phases": [phase("decode")]}, "the last phase is 'decode' for at most 32, expected 'prefill' for any 32 tokens"),
        ({"phases": [phase("prefill"), phase("decode")]}, "the last phase is 'decode'"),
        (
            {"phases": [phase("prefill", max_tokens=31)]},
            "the last phase is 'prefill' for at most 31, expected 'prefill' for any 32",
        ),
        ({"phases": [phase("prefill", single_token=True)]}, "the last phase is 'prefill' for single tokens, at most 32"),
        (
            {"phases": [phase("decode", max_tokens=33), phase("prefill")]},
            "phase 'decode' is for 33 tokens, but max_tokens is 32",
        ),
        (
            {"weights": [{"name": "seed", "dtype": "BF16", "shape": [32]}]},
            "is F32 [16], but program.json says BF16 [32]",
        ),
        (
            {"weights": [{"name": "seed", "dtype": "F32", "shape": [4, 4]}]},
            "is F32 [16], but program.json says F32 [4, 4]",
        ),
        ({"weights": []}, "1 weights are not in program.json, first 'seed'"),
        (
            {"weights": [{"name": name, "dtype": "F32", "shape": [16]} for name in ("seed", "b")]},
            "are absent, first 'b'",
        ),
        ({"weights": [{"name": "seed", "dtype": "F32", "shape": [16]}] * 2}, "listed more than once"),
        ({"backend": "cuda"}, "not a program description"),
        ({"backend": "tpu"}, "backend is 'tpu', expected one of cpu, cuda, rocm; upgrade llmc"),
        ({"machine": "aarch64-linux"}, "is for aarch64-linux; this machine is x86_64-linux"),
    ],
)
def test_wrong_programs(build_bundle: Callable[..., Path], tmp_path: Path, changes: dict[str, object], text: str) -> None:
    refused(build_bundle(tmp_path / "b", program_changes=changes), text)


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("block_size", 32, "block_size is 32, expected 16"),
        ("layer_dtypes", ["int3"], "layer_dtypes holds 'int3', expected of each f32, bf16, fp8, int8, int4"),
        ("layer_dtypes", ["f32", "f32"], "layer_dtypes lists 2 layers, but kv_cache.num_layers is 1"),
        ("layer_dtypes", [], "layer_dtypes lists 0 layers, but kv_cache.num_layers is 1"),
        ("layer_dtypes", "f32", "Expected `array`"),
        ("layer_dtypes", ["int8"], "bytes_per_block is 128, but 2 * 1 heads * 16 tokens of 1 int8 layers take 160"),
        ("layer_dtypes", ["int4"], "bytes_per_block is 128, but 2 * 1 heads * 16 tokens of 1 int4 layers take 576"),
        ("bytes_per_block", 64, "bytes_per_block is 64, but 2 * 1 heads * 16 tokens of 1 f32 layers take 128"),
        ("bytes_per_slot", 256, "bytes_per_slot is 256, but 0 layers with slots of 4 blocks in bf16 take 0"),
        ("bytes_per_slot", -1, "bytes_per_slot"),
        ("bytes_per_block", 160, "expected a multiple of 64"),
        ("num_layers", 0, "num_layers"),
    ],
)
def test_wrong_kv_caches(build_bundle: Callable[..., Path], tmp_path: Path, key: str, value: object, text: str) -> None:
    good = {
        "layer_dtypes": ["f32"],
        "num_layers": 1,
        "num_kv_heads": 1,
        "head_dim": 1,
        "block_size": 16,
        "bytes_per_block": 128,
    }
    refused(build_bundle(tmp_path / "b", program_changes={"kv_cache": {**good, key: value}}), text)


def test_too_small_slots(build_bundle: Callable[..., Path], tmp_path: Path) -> None:
    cache = {
        "layer_dtypes": ["int8"],
        "num_layers": 1,
        "num_kv_heads": 1,
        "head_dim": 1,
        "block_size": 16,
        "bytes_per_block": 192,
    }
    text = "bytes_per_slot is 0, but 1 layers with slots of 4 blocks in bf16 take 256"
    refused(build_bundle(tmp_path / "b", program_changes={"kv_cache": cache}), text)


def entry(**changes: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": [16], "data_offsets": [0, 64], **changes}


@pytest.mark.parametrize(
    ("header", "text"),
    [
        (b"{", "header is damaged"),
        (b"[]", "header is damaged"),
        (b"[" * 50_000, "header is damaged"),
        (json.dumps({"seed": entry(dtype="F17")}).encode(), "dtype 'F17'"),
        (json.dumps({"seed": entry(shape=[15])}).encode(), "lies at bytes 0 to 64; expected 0 to 60"),
        (json.dumps({"seed": entry(shape=[-4, -4])}).encode(), "header is damaged"),
        (json.dumps({"seed": entry(shape=[2**62, 2**62])}).encode(), "header is damaged"),
        (json.dumps({"seed": entry(shape=[2.5])}).encode(), "header is damaged"),
        (json.dumps({"seed": entry(data_offsets=[0, 1 << 60], shape=[1 << 58])}).encode(), "but the file holds 64"),
        (json.dumps({"seed": entry(data_offsets=[64, 0])}).encode(), "header is damaged"),
        (json.dumps({"seed": entry(data_offsets=[-64, 0])}).encode(), "header is damaged"),
        (json.dumps({"seed": entry(data_offsets=[0, 32], shape=[8])}).encode(), "end at byte 32 of the data, but"),
        (json.dumps({"seed": entry(), "b": entry()}).encode(), "expected 64 to 128"),
        (json.dumps({"a": entry()}).encode(), "1 weights of program.json are absent, first 'seed'"),
    ],
)
def test_hostile_safetensors_headers(
    bundle: Path,
    rewrite_weights: Callable[..., None],
    rewrite_manifest: Callable[..., None],
    header: bytes,
    text: str,
) -> None:
    rewrite_weights(bundle / WEIGHTS, header)
    rewrite_manifest(bundle)
    refused(bundle, str(bundle / WEIGHTS), text)


@pytest.mark.parametrize("length", [0, 3, 8, 100])
def test_truncated_safetensors(bundle: Path, rewrite_manifest: Callable[..., None], length: int) -> None:
    os.truncate(bundle / WEIGHTS, length)
    rewrite_manifest(bundle)
    refused(bundle, str(bundle / WEIGHTS))


@pytest.mark.parametrize("claim", [2**64 - 1, 2**63, 10**9, 4096 + 64])
def test_a_safetensors_header_that_lies_about_its_length(
    bundle: Path, rewrite_manifest: Callable[..., None], claim: int
) -> None:
    data = (bundle / WEIGHTS).read_bytes()
    (bundle / WEIGHTS).write_bytes(claim.to_bytes(8, "little") + data[8:])
    rewrite_manifest(bundle)
    refused(bundle, str(bundle / WEIGHTS))


def test_misaligned_weights(bundle: Path, rewrite_manifest: Callable[..., None]) -> None:
    header = json.dumps({"seed": entry()}).encode()
    (bundle / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    rewrite_manifest(bundle)
    refused(bundle, "does not start on a 64-byte boundary")


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("tokenizer.json", b"{}", "not a tokenizer"),
        ("tokenizer.json", b"\xff\xfe", "not a tokenizer"),
        ("tokenizer_config.json", b"[]", "not a JSON object"),
        ("config.json", b"{", "not a JSON object"),
        ("generation_config.json", b"\xff", "not a JSON object"),
        ("chat_template.jinja", b"{% if %}", "not a valid chat template"),
        ("chat_template.jinja", b"\xff", "not UTF-8"),
        (LIBRARY, b"\x7fELF but not really", "cannot be opened as a program library"),
    ],
)
def test_intact_but_unusable_files(
    bundle: Path, rewrite_manifest: Callable[..., None], name: str, content: bytes, text: str
) -> None:
    (bundle / name).write_bytes(content)
    rewrite_manifest(bundle)
    refused(bundle, text)


def test_a_bundle_without_a_needed_file(bundle: Path, rewrite_manifest: Callable[..., None]) -> None:
    (bundle / "config.json").unlink()
    rewrite_manifest(bundle)
    refused(bundle, "needs 'config.json', which is not in files")


def test_a_bundle_without_a_tokenizer_takes_token_ids_alone(bundle: Path, rewrite_manifest: Callable[..., None]) -> None:
    for path in bundle.glob("*tokenizer*"):
        path.unlink()
    (bundle / "chat_template.jinja").unlink(missing_ok=True)
    rewrite_manifest(bundle)
    with llmc.load(bundle) as engine:
        output = engine.generate([5, 6, 7], llmc.SamplingParams(max_tokens=4, ignore_eos=True))
        assert len(output.token_ids) == 4
        assert output.text == ""
        with pytest.raises(RequestError, match="no tokenizer; pass the prompt as token ids"):
            engine.generate("text")


def test_a_damaged_file_is_named_before_its_consequence(bundle: Path) -> None:
    """The tokenizer cannot be parsed and the weights are damaged: the load order puts the hashes first."""
    (bundle / "tokenizer.json").write_bytes(b"{" * (bundle / "tokenizer.json").stat().st_size)
    refused(bundle, "tokenizer.json: SHA-256 is")


def test_sizes_only_skips_the_hashes(bundle: Path) -> None:
    data = bytearray((bundle / "config.json").read_bytes())
    data[-1] = ord(" ")
    (bundle / "config.json").write_bytes(data[:-1] + b"}")
    edit_manifest(bundle, lambda manifest: manifest["files"]["config.json"].update(sha256="0" * 64))
    refused(bundle, "SHA-256")
    with llmc.load(bundle, verify="sizes"):
        pass


def test_the_target_is_the_first_that_runs_here(build_bundle: Callable[..., Path], tmp_path: Path) -> None:
    two = build_bundle(tmp_path / "two", targets=("cpu-f32", "cpu-int8"))
    assert Bundle.open(two).entry.name == "cpu-f32"
    assert Bundle.open(two, target="cpu-int8").entry.name == "cpu-int8"
    with pytest.raises(UsageError, match="no target 'cpu-int4'; the bundle holds cpu-f32, cpu-int8"):
        llmc.load(two, target="cpu-int4")


def test_without_a_driver_a_mixed_bundle_runs_on_the_cpu(
    toy_bundle: Path, build_gpu_bundle: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmc.runtime.bundle.survey_cuda", lambda: CudaSurvey(problem="there is no driver"))
    mixed = build_gpu_bundle(tmp_path / "mixed", cpu_bundle=toy_bundle)
    with llmc.load(mixed) as engine:
        assert engine.executor.description.startswith("cpu (")
        assert "h100-fp8: is for an NVIDIA GPU, but there is no driver" in engine.target_choice
    refused(mixed, "but there is no driver", "--executor interpreter", load=lambda path: llmc.load(path, target="h100-fp8"))
    targets = {"h100-fp8": ("cuda", "sm_90"), "mi300x-fp8": ("rocm", "gfx942")}
    refused(build_gpu_bundle(tmp_path / "gpu", targets=targets), "no target runs here", "--executor interpreter")


def test_verify_lists_every_problem(bundle: Path) -> None:
    (bundle / "config.json").unlink()
    (bundle / WEIGHTS).write_bytes(b"")
    problems = {check.subject for check in verify_bundle(bundle).problems}
    assert problems == {"config.json", WEIGHTS, "cpu-f32"}


def test_an_unreadable_file(bundle: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root reads everything")
    (bundle / "config.json").chmod(0)
    refused(bundle, "Permission denied")
