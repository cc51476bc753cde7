"""GPU programs and several weight files: what is checked before anything is launched."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llmc.errors import BundleError
from llmc.runtime import Bundle

PROGRAM = "programs/h100-fp8/program.json"
Edit = Callable[[dict[str, Any]], object]


def open_bundle(path: Path) -> Bundle:
    return Bundle.open(path, executor="interpreter")


def refused(path: Path, *texts: str) -> None:
    with pytest.raises(BundleError) as caught:
        open_bundle(path)
    assert "\n" not in str(caught.value)
    for text in texts:
        assert text in str(caught.value)


def test_a_good_one_opens(gpu_bundle: Path) -> None:
    bundle = open_bundle(gpu_bundle)
    assert bundle.weight_places() == [(1, 4096), (0, 4096)]  # the program's order, not the files'
    files = bundle.weight_files()
    assert bundle.weight_addresses() == [files[1].address + 4096, files[0].address + 4096]
    assert bundle.beside_program("kernels/sm_90/toy_embed.bin")[1].startswith(b"\x7fELF")


def embed(program: dict[str, Any]) -> dict[str, Any]:
    return program["phases"][-1]["calls"][0]


def set_argument(index: int, *argument: object) -> Edit:
    return lambda program: embed(program)["arguments"].__setitem__(index, list(argument))


def set_float(*argument: object) -> Edit:
    """An argument for a parameter that is a float."""

    def edit(program: dict[str, Any]) -> None:
        program["kernels"]["toy_embed"]["parameters"][4][1] = "fp32"
        for phase in program["phases"]:
            phase["calls"][0]["arguments"][4] = list(argument)

    return edit


def set_sampler_argument(index: int, *argument: object) -> Edit:
    return lambda program: program["sampler"]["arguments"].__setitem__(index, list(argument))


def set_kernel(**changes: object) -> Edit:
    return lambda program: program["kernels"]["toy_embed"].update(changes)


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (lambda program: program["kernels"].pop("toy_embed"), "toy_embed calls kernel 'toy_embed', which is not among the kernels"),
        (lambda program: embed(program).update(kernel="x" * 500), "calls kernel 'xxx"),
        (lambda program: program["sampler"].update(kernel="no"), "calls kernel 'no'"),
        (lambda program: embed(program)["arguments"].pop(), "over 3 axes with 4 arguments, expected 3 and 5"),
        (lambda program: embed(program).update(arguments=[]), "with 0 arguments"),
        (lambda program: embed(program).update(grid=[{}, {}]), "over 2 axes with 5 arguments"),
        (lambda program: embed(program).update(grid=[{"symbol": "X"}, {}, {}]), "not a program description"),
        (lambda program: embed(program).update(grid=[{"divisor": 0}, {}, {}]), "not a program description"),
        (lambda program: embed(program).update(grid=[{"factor": -1}, {}, {}]), "not a program description"),
        (set_argument(0, "input", "passwords"), "passes ['input', 'passwords'] for token_ids (*i32) of toy_embed"),
        (set_argument(0, "input", 0), "passes ['input', 0]"),
        (set_argument(0, "symbol", "T"), "passes ['symbol', 'T'] for token_ids (*i32)"),
        (set_argument(0, "constant", 4096), "passes ['constant', 4096] for token_ids (*i32)"),
        (set_argument(0, "file", 0), "not a program description"),
        (set_argument(0, "kv_pool", 64), "passes ['kv_pool', 64]"),
        (set_argument(0, "logits", "0"), "passes ['logits', '0']"),
        (set_argument(0, "sampling", 0), "passes ['sampling', 0]"),
        (set_argument(0, "sampled", 0), "passes ['sampled', 0]"),
        (set_argument(1, "weight", 2), "passes ['weight', 2] for table"),
        (set_argument(1, "weight", -1), "passes ['weight', -1]"),
        (set_argument(1, "weight", "table"), "passes ['weight', 'table']"),
        (set_argument(3, "arena", 1 << 40), f"passes ['arena', {1 << 40}] for x (*fp32)"),
        (set_argument(3, "arena", -64), "passes ['arena', -64]"),
        (set_argument(3, "arena", 0.5), "passes ['arena', 0.5]"),
        (set_argument(4, "arena", 0), "passes ['arena', 0] for num_tokens (i32)"),
        (set_argument(4, "symbol", "Q"), "passes ['symbol', 'Q']"),
        (set_argument(4, "symbol", ""), "passes ['symbol', '']"),
        (set_argument(4, "constant", 1 << 31), f"passes ['constant', {1 << 31}] for num_tokens (i32)"),
        (set_argument(4, "constant", "8"), "passes ['constant', '8']"),
        (set_argument(4, "constant", 0.5), "passes ['constant', 0.5] for num_tokens (i32)"),
        (set_float("symbol", "T"), "passes ['symbol', 'T'] for num_tokens (fp32)"),
        (set_float("constant", "0.5"), "passes ['constant', '0.5'] for num_tokens (fp32)"),
        (set_float("constant", 1 << 2000), "for num_tokens (fp32)"),
        (set_float("constant", -1e300), "passes ['constant', -1e+300] for num_tokens (fp32)"),
        (set_argument(4, "constant", 1 << 70), f"passes ['constant', {1 << 70}]"),
        (set_sampler_argument(4, "symbol", "T"), "passes ['symbol', 'T'] for num_rows"),
        (set_sampler_argument(0, "input", "positions"), "passes ['input', 'positions'] for logits"),
        (lambda program: program["sampler"].update(grid=[{"symbol": "T"}, {}, {}]), "is the sampler, but its grid depends on more than R"),
        (lambda program: program.pop("sampler"), "not a program description"),
        (set_kernel(parameters=[["x", "*bf15"]] * 5), "parameter x of toy_embed has the unknown type '*bf15'"),
        (set_kernel(parameters=[["x", "bf16"]] * 5), "parameter x of toy_embed has the unknown type 'bf16'"),
        (set_kernel(num_warps=0), "num_warps"),
        (set_kernel(source="kernels/none.py"), "'kernels/none.py' is not among the manifest's files"),
        (set_kernel(binary="kernels/none.bin"), "'kernels/none.bin' is not among the manifest's files"),
        (set_kernel(source="../../config.json"), "may not be absolute"),
        (set_kernel(binary="/etc/passwd"), "may not be absolute"),
        (set_kernel(binary="kernels//x"), "may not be absolute"),
        (lambda program: program.update(phases=program["phases"][:-1]), "the last phase is 'decode-8' for single tokens"),
        (lambda program: program.update(warp_size=0), "warp_size"),
        (lambda program: program.update(libraries={}, backend="cpu"), "no 'portable' library"),
    ],
)  # fmt: skip
def test_hostile_programs(build_gpu_bundle: Callable[..., Path], tmp_path: Path, edit: Edit, text: str) -> None:
    refused(build_gpu_bundle(tmp_path / "b", edit=edit), PROGRAM, text)


@pytest.mark.parametrize("name", ["kernels/toy_kernels.py", "kernels/sm_90/toy_logits.bin"])
def test_a_changed_or_missing_kernel_file(build_gpu_bundle: Callable[..., Path], tmp_path: Path, name: str) -> None:
    path = build_gpu_bundle(tmp_path / "b")
    file = path / "programs/h100-fp8" / name
    data = bytearray(file.read_bytes())
    data[-2] ^= 1
    file.write_bytes(data)
    refused(path, str(file), "SHA-256 is")
    file.unlink()
    refused(path, str(file), "No such file")


def set_weights(path: Path, rewrite: Callable[..., None], names: list[str]) -> None:
    rewrite(path, keep_targets=True)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["targets"][0]["weights"] = names
    (path / "manifest.json").write_text(json.dumps(manifest))


def test_weights_are_the_union_of_the_files_and_nothing_else(
    build_gpu_bundle: Callable[..., Path], rewrite_manifest: Callable[..., None], tmp_path: Path
) -> None:
    path = build_gpu_bundle(tmp_path / "b")
    table, bias = "weights/toy-table.safetensors", "weights/toy-bias.safetensors"
    set_weights(path, rewrite_manifest, [table, bias])
    assert open_bundle(path).weight_places() == [(0, 4096), (1, 4096)]
    set_weights(path, rewrite_manifest, [table])
    refused(path, table, "1 weights of program.json are absent, first 'bias'")
    (path / "weights/copy.safetensors").write_bytes((path / bias).read_bytes())
    set_weights(path, rewrite_manifest, [table, bias, "weights/copy.safetensors"])
    refused(path, "weight 'bias' is in", "toy-bias.safetensors, too; compile the bundle again")
    data = (path / bias).read_bytes().replace(b'"bias"', b'"busy"')
    (path / "weights/copy.safetensors").write_bytes(data)
    set_weights(path, rewrite_manifest, [table, bias, "weights/copy.safetensors"])
    refused(path, "1 weights are not in program.json, first 'busy'")
    set_weights(path, rewrite_manifest, [table, "weights/copy.safetensors"])
    refused(path, f"{path / table} and {path / 'weights/copy.safetensors'}: 1 weights of program.json are absent")
    (path / bias).write_bytes((path / bias).read_bytes()[:-4])
    set_weights(path, rewrite_manifest, [table, bias])
    refused(path, "toy-bias.safetensors: the weights end at byte 64 of the data, but the file holds 60")
