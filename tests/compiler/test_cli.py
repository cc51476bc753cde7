"""The compile and inspect verbs as a user meets them: exit codes, one JSON object, one line for an error."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest


def _llmc(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "llmc", *map(str, arguments)], capture_output=True, text=True, timeout=300)


def test_compile_run_inspect_verify(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    out, dumps = tmp_path / "m.llmc", tmp_path / "dumps"
    done = _llmc(
        "compile",
        tiny_checkpoint("llama"),
        "--target",
        "cpu-int8",
        "--cpu-levels",
        "native",
        "-o",
        out,
        "--dump-ir",
        dumps,
        "--json",
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["output"] == str(out)
    target = report["targets"]["cpu-int8"]
    assert target["passes"][0]["name"] == "canonicalise"
    assert target["weight_bytes"]["int8-g128"] > 0
    assert _llmc("verify", out).returncode == 0
    ran = json.loads(_llmc("run", out, "-p", "ab", "-n", 5, "--ignore-eos", "--json").stdout)
    assert len(ran["token_ids"]) == 5
    for where in (out, dumps):
        overview = json.loads(_llmc("inspect", where, "--json").stdout)
        assert [p["name"] for p in overview["passes"]][-1] == "plan-memory"
        assert overview["operators"]["llmc.linear"] == 2 * (3 * 2 + 1)  # two phases of two layers and a head
        graph = _llmc("inspect", where, "--pass", "fuse-rope").stdout
        assert "llmc.rope(" in graph
        assert "aten.cos" not in graph
        diff = _llmc("inspect", where, "--diff", "fuse-rope", "fuse-glu").stdout.splitlines()
        assert [line for line in diff if line.startswith("+") and "llmc.glu(" in line]
        assert [line for line in diff if line.startswith("-") and "aten.silu" in line]
    text = _llmc("inspect", out).stdout
    for expected in ("fuse-add-norm", "llmc.linear_glu", "U8", "memory: decode", "target cpu-int8"):
        assert expected in text
    kernels = json.loads(_llmc("inspect", out, "--kernels", "--json").stdout)["kernel_calls"]["cpu-int8"]
    assert {"prefill", "decode"} == set(kernels)
    assert any(call["kernel"].startswith("attention_decode<16") for call in kernels["decode"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compile", "/nowhere", "--target", "cpu-int8"], "no such file or folder"),
        (["compile", "MODEL", "--target", "cpu-int9"], "has no scheme 'int9'; it has f32, bf16, fp16, int8, int6, int5, int4, int3"),
        (["compile", "MODEL", "--target", "cpu-int8", "--num-layers", "0"], "at least 1"),
        (["compile", "MODEL", "--target", "cpu-int8", "--verify-each=abc"], "not a number"),
        (["compile", "MODEL", "--target", "cpu-int8", "--stop-after", "fuse-ropes"], "choose one of"),
        (["inspect", "MODEL"], "neither a bundle"),
        (["inspect", "MODEL", "--pass", "a", "--kernels"], "exclude each other"),
    ],
)
def test_errors_are_one_line_and_exit_2(tiny_checkpoint: Callable[..., Path], arguments: list[str], message: str) -> None:
    done = _llmc(*(str(tiny_checkpoint("llama")) if a == "MODEL" else a for a in arguments))
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
    failed = _llmc(*(str(tiny_checkpoint("llama")) if a == "MODEL" else a for a in arguments), "--json")
    assert json.loads(failed.stdout)["error"]["exit_code"] == 2


@pytest.mark.skipif(find_spec("ziglang") is not None, reason="the ziglang wheel is a compiler")
def test_no_compiler_is_one_sentence(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "llmc",
        "compile",
        str(tiny_checkpoint("llama")),
        "--target",
        "cpu-f32",
        "-o",
        str(tmp_path / "x"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env={"PATH": str(tmp_path), "HOME": str(tmp_path)})
    assert done.returncode == 2
    assert "no working C++17 compiler" in done.stderr
    assert not (tmp_path / "x").exists()
