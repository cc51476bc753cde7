"""The interpreter executor over the toy kernels: the whole way from program.json to tokens, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import llmc
import numpy as np
import pytest
from llmc.errors import BundleError, UsageError
from llmc.runtime import Engine, SamplingParams

pytest.importorskip("triton")
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
Numpy = Callable[[Sequence[int]], np.ndarray]
Build = Callable[..., Path]


@pytest.fixture(scope="module")
def engine(gpu_bundle: Path) -> Iterator[Engine]:
    with llmc.load(gpu_bundle, executor="interpreter", max_num_seqs=4) as loaded:
        yield loaded


def test_logits_are_those_of_numpy(engine: Engine, gpu_logits: Numpy) -> None:
    ids = list(range(3, 43))  # more than max_tokens: two steps
    np.testing.assert_array_equal(engine.logits(ids), gpu_logits(ids))


def test_batches_decode_to_the_tokens_of_numpy(engine: Engine, gpu_logits: Numpy) -> None:
    prompts = [[5], list(range(3, 40)), [9, 8, 7]]
    for prompt, output in zip(prompts, engine.generate(prompts, GREEDY), strict=True):
        ids = list(prompt)
        for _ in range(4):
            ids.append(int(gpu_logits(ids)[-1].argmax()))
        assert output.token_ids == ids[len(prompt) :]


def test_the_sampler_gets_each_rows_record(engine: Engine, gpu_logits: Numpy) -> None:
    """The toy's sampler adds seed + 7 * offset to the likeliest token."""
    params = SamplingParams(max_tokens=3, temperature=1.0, seed=40, ignore_eos=True)
    outputs = engine.generate([[5, 6], [7]], [params, GREEDY])
    ids = [5, 6]
    for offset in range(3):
        ids.append((int(gpu_logits(ids)[-1].argmax()) + 40 + 7 * offset) % 300)
    assert outputs[0].token_ids == ids[2:]
    assert outputs[1].token_ids[0] == int(gpu_logits([7])[-1].argmax())


def test_what_it_says_of_itself(engine: Engine) -> None:
    assert engine.executor.description == "Triton's interpreter (sm_90 kernels)"
    assert engine.target_choice.startswith("target h100-fp8 on Triton's interpreter, ")


def test_kernels_for_amd_are_interpreted_too(build_gpu_bundle: Build, gpu_logits: Numpy, tmp_path: Path) -> None:
    path = build_gpu_bundle(tmp_path / "b", targets={"mi300x-fp8": ("rocm", "gfx942")})
    with llmc.load(path, executor="interpreter") as engine:
        np.testing.assert_array_equal(engine.logits([5, 6, 7]), gpu_logits([5, 6, 7]))


@pytest.mark.parametrize("source", [b"def kernel(:\n", b"x = '\0'\n", b"\xff\xfe", b"  return\n"])
def test_a_source_that_is_not_python(
    build_gpu_bundle: Build, rewrite_manifest: Callable[..., None], tmp_path: Path, source: bytes
) -> None:
    path = build_gpu_bundle(tmp_path / "b")
    (path / "programs/h100-fp8/kernels/toy_kernels.py").write_bytes(source)
    rewrite_manifest(path, keep_targets=True)
    with pytest.raises(BundleError, match=r"toy_kernels\.py: not a kernel's source: .*; compile the bundle again"):
        llmc.load(path, executor="interpreter")


@pytest.mark.parametrize(
    ("source", "reason"),
    [("x = 1\n", "KeyError: 'toy_embed'"), ("raise OSError('no')\n", "OSError: no"), ("import nowhere_", "nowhere_")],
)
def test_a_source_that_does_not_define_its_kernel(build_gpu_bundle: Build, tmp_path: Path, source: str, reason: str) -> None:
    with llmc.load(build_gpu_bundle(tmp_path / "b", source=source), executor="interpreter") as engine:
        with pytest.raises(BundleError) as caught:
            engine.generate([5], GREEDY)
        assert "toy_kernels.py: does not define kernel toy_embed: " in str(caught.value)
        assert reason in str(caught.value)


def test_only_by_name_and_only_gpu_targets(gpu_bundle: Path, toy_bundle: Path) -> None:
    with pytest.raises(BundleError, match="is for cuda, which executor='cpu' does not run; compile a cpu target, too"):
        llmc.load(gpu_bundle, executor="cpu")
    with pytest.raises(BundleError, match="is for cpu, which executor='interpreter' does not run"):
        llmc.load(toy_bundle, executor="interpreter")
    with pytest.raises(UsageError, match="level='avx2' is for CPU targets"):
        llmc.load(gpu_bundle, executor="interpreter", level="avx2")


def test_a_process_that_compiles_with_triton_is_told(gpu_bundle: Path) -> None:
    script = (
        "import triton, llmc\nfrom llmc.errors import UsageError\n"
        f"try: llmc.load({str(gpu_bundle)!r}, executor='interpreter')\nexcept UsageError as error: print(error)"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True)
    assert "imported for compiling before" in result.stdout


def test_torch_is_not_imported(gpu_bundle: Path) -> None:
    script = (
        f"import sys, llmc\nwith llmc.load({str(gpu_bundle)!r}, executor='interpreter') as engine:\n"
        "    engine.generate([5, 6], llmc.SamplingParams(max_tokens=2, ignore_eos=True))\nprint('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"
