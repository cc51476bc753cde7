"""The command line as a user meets it: exit codes, one-line errors, one JSON object, and no torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import llmc
import pytest
from llmc.runtime import SamplingParams
from llmc.runtime.devices import this_processor


def run(*args: str | Path, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from llmc.compiler.cli import main; main()", *map(str, args)]
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8", **env}
    return subprocess.run(command, input=stdin, capture_output=True, encoding="utf-8", env=environment, check=False)


def test_run_streams_the_text_of_the_engine(toy_bundle: Path) -> None:
    with llmc.load(toy_bundle) as engine:
        params = SamplingParams(max_tokens=20, temperature=0.0)
        raw = engine.generate("the fox", params)
        chat = engine.generate([{"role": "user", "content": "the fox"}], params)
    flags = ("--max-tokens", "20", "--temperature", "0")
    result = run("run", toy_bundle, "-p", "the fox", "--raw", *flags)
    assert (result.returncode, result.stdout, result.stderr) == (0, raw.text + "\n", "")
    result = run("run", toy_bundle, "-p", "-", "--stats", *flags, stdin="the fox")
    assert (result.returncode, result.stdout) == (0, chat.text + "\n")
    choice, timings = result.stderr.splitlines()
    assert choice == f"target cpu-f32 on {this_processor()}"
    assert f"{chat.stats.prompt_tokens} prompt + {len(chat.token_ids)} generated tokens" in timings
    assert "TTFT" in timings


def test_run_json_is_one_object(toy_bundle: Path) -> None:
    result = run("run", toy_bundle, "-p", "the fox", "--json", "--max-tokens", "5", "--ignore-eos")
    assert result.returncode == 0
    data = json.loads(result.stdout)
    assert len(data["token_ids"]) == 5
    assert data["finish_reason"] == "length"
    assert data["chat"] is True
    assert data["stats"]["generated_tokens"] == 5
    assert data["stats"]["ttft_ms"] > 0


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["run"], "Missing argument 'BUNDLE'"),
        (["run", "{bundle}"], "Missing option '-p'"),
        (["rnu"], "unknown command 'rnu'; expected one of compile"),
        (["run", "{bundle}", "-p", "x", "--top-p", "2"], "top_p=2.0: expected a number from 0 to 1"),
        (["run", "{bundle}", "-p", "x", "--max-tokens", "none"], "'none' is not a valid integer"),
        (["run", "{bundle}", "-p", ""], "empty"),
        (["run", "{bundle}", "-p", "x", "--target", "cpu-int9"], "no target 'cpu-int9'; the bundle holds cpu-f32"),
        (["run", "/nowhere", "-p", "x"], "not a bundle"),
        (["verify", "/nowhere"], "not a bundle"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_bad_usage_is_one_line_and_exit_code_2(
    build_bundle: Callable[..., Path], tmp_path: Path, args: list[str], text: str, as_json: bool
) -> None:
    bundle = str(build_bundle(tmp_path / "b", template="{{ messages[0].content }}"))
    result = run(*(arg.format(bundle=bundle) for arg in args), *(["--json"] if as_json else []))
    assert result.returncode == 2
    assert text in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    if as_json:
        error = json.loads(result.stdout)["error"]
        assert text in error["message"]
        assert error["exit_code"] == 2
    else:
        assert result.stdout == ""


def test_bad_environment_is_a_usage_error() -> None:
    result = run("targets", LLMC_LOG="loud")
    assert result.returncode == 2
    assert result.stderr == "error: LLMC_LOG='loud': not a log level; expected one of debug, info, warning, error\n"


def test_an_internal_error_shows_its_traceback_only_when_asked(toy_bundle: Path) -> None:
    script = (
        "import llmc.compiler.cli.run as run\n"
        "def broken(*args, **kwargs): raise KeyError('boom')\n"
        "run.load = broken\n"
        f"from llmc.compiler.cli import main; main(['run', {str(toy_bundle)!r}, '-p', 'x'])"
    )
    for level, shown in (("warning", False), ("debug", True)):
        result = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ, "LLMC_LOG": level}
        )
        assert result.returncode == 1
        assert "error: internal error: KeyError: 'boom'" in result.stderr
        assert ("Traceback" in result.stderr) is shown


def test_verify_tells_a_good_bundle_from_a_changed_one(toy_bundle: Path, tmp_path: Path) -> None:
    good = run("verify", toy_bundle)
    assert good.returncode == 0
    assert "runs here, level portable" in good.stdout
    assert "FAILED" not in good.stdout

    bundle = shutil.copytree(toy_bundle, tmp_path / "b")
    (bundle / "notes.txt").write_text("extra")
    data = bytearray((bundle / "weights/cpu-f32.safetensors").read_bytes())
    data[-1] ^= 1
    (bundle / "weights/cpu-f32.safetensors").write_bytes(data)
    (bundle / "config.json").write_text("{}")
    bad = run("verify", bundle)
    assert bad.returncode == 1
    assert bad.stdout.count("FAILED") == 3  # two files and the target
    assert "never read: notes.txt" in bad.stderr
    assert "weights/cpu-f32.safetensors: SHA-256 is" in bad.stderr
    result = run("verify", bundle, "--json")
    assert result.returncode == 1
    report = json.loads(result.stdout)
    assert report["ok"] is False
    assert report["extra_files"] == ["notes.txt"]
    assert len([check for check in report["checks"] if check["problem"]]) == 3


def test_a_gpu_bundle_in_the_interpreter(gpu_bundle: Path) -> None:
    flags = ("-p", "a", "--raw", "-n", "2", "--ignore-eos")
    result = run("run", gpu_bundle, *flags, "--stats", "--executor", "interpreter")
    assert result.returncode == 0
    assert result.stderr.startswith("target h100-fp8 on Triton's interpreter, ")
    result = run("run", gpu_bundle, *flags, "--json", "--executor", "interpreter")
    assert json.loads(result.stdout)["device"] == "Triton's interpreter (sm_90 kernels)"
    result = run("run", gpu_bundle, *flags, "--executor", "gpu")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    result = run("run", gpu_bundle, *flags, LLMC_LOG="info", CUDA_VISIBLE_DEVICES="-1")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert "--executor interpreter" in result.stderr


def test_verify_lists_kernels(gpu_bundle: Path) -> None:
    assert "5 kernels for sm_90" in run("verify", gpu_bundle).stdout
    report = json.loads(run("verify", gpu_bundle, "--json").stdout)
    assert report["ok"]
    assert {kernel["name"] for kernel in report["kernels"]} > {"toy_embed", "toy_sample"}
    assert {kernel["arch"] for kernel in report["kernels"]} == {"sm_90"}


def test_the_choice_of_a_target_is_logged(toy_bundle: Path) -> None:
    result = run("run", toy_bundle, "-p", "a", "-n", "1", LLMC_LOG="info")
    assert result.stderr == f"INFO: target cpu-f32 on {this_processor()}\n"


def test_targets() -> None:
    text = run("targets").stdout
    assert "h100" in text
    assert "-fp8" in text
    names = [target["name"] for target in json.loads(run("targets", "--json").stdout)["targets"]]
    assert {"cpu-f32", "cpu-bf16", "cpu-int8", "cpu-int4", "h100-fp8"} <= set(names)


def test_help_and_version_need_no_verb_module() -> None:
    result = run("--help")
    assert result.returncode == 0
    for verb in ("compile", "run", "verify", "LLMC_NUM_THREADS"):
        assert verb in result.stdout
    assert run("--version").stdout == f"llmc {llmc.__version__}\n"


def test_running_imports_neither_torch_nor_the_compiler(toy_bundle: Path) -> None:
    script = (
        "import sys\n"
        "from llmc.compiler.cli import main\n"
        "try:\n"
        f"    main(['run', {str(toy_bundle)!r}, '-p', 'x', '--max-tokens', '2'])\n"
        "except SystemExit as end:\n"
        "    assert end.code == 0\n"
        "heavy = {'torch', 'transformers', 'onnx', 'networkx', 'gguf'} & set(sys.modules)\n"
        "ours = ('llmc.passes', 'llmc.codegen', 'llmc.targets')\n"
        "heavy |= {name for name in sys.modules if name.startswith(ours)}\n"
        "print(sorted(heavy), file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stderr == "[]\n"


def test_importing_the_runtime_is_light() -> None:
    """The names of the modules rather than the time, which another process on the machine would spoil."""
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "import llmc.runtime"], capture_output=True, text=True, check=True
    )
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "llmc.runtime.engine" in imported
    packages = {name.partition(".")[0] for name in imported}
    assert not packages & {"torch", "transformers", "tokenizers", "jinja2", "safetensors", "rich", "click"}


def test_a_closed_pipe_is_no_traceback(toy_bundle: Path) -> None:
    command = f"{sys.executable} -c 'from llmc.compiler.cli import main; main()' run {toy_bundle} -p x -n 200 --ignore-eos"
    result = subprocess.run(["bash", "-c", f"{command} | true"], capture_output=True, text=True)
    assert result.stderr == ""
