"""The toy program on a real GPU: its kernels are compiled for the device that is there, and `llmc.load` does the rest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import llmc
import numpy as np
import pytest
from llmc.runtime import SamplingParams
from llmc.runtime.devices import survey_cuda
from llmc.runtime.verification import verify_bundle

Numpy = Callable[[Sequence[int]], np.ndarray]
KERNELS = Path(__file__).parents[1] / "toy_kernels.py"


def compile_kernels(program: dict[str, Any], folder: Path, arch: str) -> None:
    """Put real binaries where the bundle has fakes, and their shared memory into program.json."""
    jobs = [
        {
            "source": KERNELS.read_text(), "name": name, "signature": dict(kernel["parameters"]), "arch": arch, "warp_size": 32,
            "num_warps": kernel["num_warps"], "num_stages": 1, "output": str(folder / name),
        }
        for name, kernel in program["kernels"].items()
    ]  # fmt: skip
    result = subprocess.run(
        [sys.executable, "-m", "llmc.codegen.triton.worker"],
        input="\n".join(map(json.dumps, jobs)),
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder / "cache")},
    )
    for job, line in zip(jobs, result.stdout.splitlines(), strict=True):
        done = json.loads(line)
        assert not done.get("error"), done
        kernel = program["kernels"][job["name"]]
        kernel["shared_bytes"] = done.get("shared_bytes", 0)
        kernel["compiled"] = f"{job['output']}.bin"


def build(build_gpu_bundle: Callable[..., Path], rewrite_manifest: Callable[..., None], folder: Path, arch: str) -> Path:
    compiled: dict[str, Any] = {}

    def edit(program: dict[str, Any]) -> None:
        compile_kernels(program, folder, arch)
        compiled.update({name: kernel.pop("compiled") for name, kernel in program["kernels"].items()})

    path = build_gpu_bundle(folder / "b", targets={"toy-gpu": ("cuda", arch)}, edit=edit)
    for name, binary in compiled.items():
        (path / f"programs/toy-gpu/kernels/{arch}/{name}.bin").write_bytes(Path(binary).read_bytes())
    rewrite_manifest(path, keep_targets=True)
    return path


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_real_binaries_are_what_verify_takes_them_for(
    build_gpu_bundle: Callable[..., Path], rewrite_manifest: Callable[..., None], tmp_path: Path, arch: str
) -> None:
    """No GPU is needed for this."""
    pytest.importorskip("triton")
    report = verify_bundle(build(build_gpu_bundle, rewrite_manifest, tmp_path, arch))
    assert report.problems == []
    assert {kernel.arch for kernel in report.kernels} == {arch}


@pytest.mark.gpu
def test_tokens_on_a_real_gpu_are_those_of_numpy(
    build_gpu_bundle: Callable[..., Path], rewrite_manifest: Callable[..., None], gpu_logits: Numpy, tmp_path: Path
) -> None:
    """Graphs of every batch size, mixed batches on two streams, logits of long texts, and sampling with a seed."""
    pytest.importorskip("triton")
    survey = survey_cuda()
    if not survey.devices:
        pytest.skip(survey.problem)
    path = build(build_gpu_bundle, rewrite_manifest, tmp_path, survey.devices[0].arch)
    with llmc.load(path) as engine:
        assert engine.target_choice == f"target toy-gpu on {survey.devices[0].description}"
        ids = list(range(3, 200))
        np.testing.assert_array_equal(engine.logits(ids), gpu_logits(ids))
        prompts = [list(range(3, 3 + length)) for length in (1, 2, 40, 17, 5, 90, 3, 4, 33)]
        outputs = engine.generate(prompts, SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True))
        for prompt, output in zip(prompts, outputs, strict=True):
            ids = list(prompt)
            for token_id in output.token_ids:
                assert token_id == int(gpu_logits(ids)[-1].argmax())
                ids.append(token_id)
        params = SamplingParams(max_tokens=3, temperature=1.0, seed=40, ignore_eos=True)
        ids = [5, 6]
        for offset in range(3):
            ids.append((int(gpu_logits(ids)[-1].argmax()) + 40 + 7 * offset) % 300)
        assert engine.generate([5, 6], params).token_ids == ids[2:]
    with llmc.load(path, max_num_seqs=1) as engine:  # the memory of the first was given back
        assert engine.generate([5, 6], params).token_ids == ids[2:]
