"""Finding a compiler, building the same bytes twice, the cache, and errors that say what to do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from llmc.codegen.cpu import toolchain
from llmc.errors import ToolchainError

SMALL = 'extern "C" __attribute__((visibility("default"))) int answer(void) { return 42; }\n'


def test_no_compiler_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "/no/such/compiler")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ToolchainError) as caught:
        toolchain.find_compiler()
    text = str(caught.value)
    assert "\n" not in text
    for word in ("$CXX (/no/such/compiler)", "g++", "clang++", "ziglang", "pip install ziglang"):
        assert word in text


def test_cxx_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiler: toolchain.Compiler) -> None:
    wrapper = tmp_path / "my compiler"
    wrapper.write_text(f'#!/bin/sh\nexec {compiler.command[0]} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", f"'{wrapper}' -O1")
    assert toolchain.find_compiler().command == (str(wrapper), "-O1")


def test_levels_follow_the_machine() -> None:
    def levels(machine: str) -> tuple[str, ...]:
        return toolchain.Compiler(command=("c++",), version="1", machine=machine, openmp=False).levels

    assert levels("x86_64-linux-gnu") == ("portable", "avx2", "avx512", "amx")
    assert levels("aarch64-linux-gnu") == ("portable",)


def test_same_bytes_wherever_it_is_built(tmp_path: Path, compiler: toolchain.Compiler) -> None:
    source = '#include "simd.hpp"\n' + SMALL
    first = toolchain.compile_library(source, "portable", tmp_path / "a" / "x.so", compiler=compiler).read_bytes()
    second = toolchain.compile_library(source, "portable", tmp_path / "b" / "y.so", compiler=compiler).read_bytes()
    assert first == second
    for text in (str(tmp_path), str(toolchain.KERNELS.parent), "llmc-"):
        assert text.encode() not in first


def test_cache(tmp_path: Path, compiler: toolchain.Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    built = toolchain.compile_levels(SMALL, tmp_path / "one", levels=["portable"], compiler=compiler, cache=cache)
    assert [path.name for path in built.values()] == ["libportable.so"]
    entries = list(cache.iterdir())
    assert len(entries) == 2  # what all programs share, and this one
    monkeypatch.setattr("subprocess.run", lambda *a, **k: pytest.fail("compiled again"))
    again = toolchain.compile_levels(SMALL, tmp_path / "two", levels=["portable"], compiler=compiler, cache=cache)
    assert again["portable"].read_bytes() == built["portable"].read_bytes()
    monkeypatch.undo()
    toolchain.compile_library(SMALL + "\n", "portable", tmp_path / "three.so", compiler=compiler, cache=cache)
    assert len(list(cache.iterdir())) == 3
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_a_damaged_cache_entry_is_made_again(tmp_path: Path, compiler: toolchain.Compiler) -> None:
    cache = tmp_path / "cache"
    whole = toolchain.compile_library(SMALL, "portable", tmp_path / "one.so", compiler=compiler, cache=cache).read_bytes()
    for size in (0, 1000):  # a crash or a full disk may leave anything
        for entry in cache.iterdir():
            entry.write_bytes(entry.read_bytes()[:size])
        again = toolchain.compile_library(SMALL, "portable", tmp_path / "two.so", compiler=compiler, cache=cache)
        assert again.read_bytes() == whole


def test_source_error_is_quoted(tmp_path: Path, compiler: toolchain.Compiler) -> None:
    with pytest.raises(ToolchainError, match=r"refused the portable program: source\.cpp:1.*error"):
        toolchain.compile_library("int x = y;", "portable", tmp_path / "x.so", compiler=compiler)
    assert not (tmp_path / "x.so").exists()


def test_unknown_level(tmp_path: Path, compiler: toolchain.Compiler) -> None:
    with pytest.raises(ToolchainError, match="levels: portable, avx2, avx512, amx"):
        toolchain.compile_library(SMALL, "sse9", tmp_path / "x.so", compiler=compiler)


def test_foreign_level(tmp_path: Path) -> None:
    arm = toolchain.Compiler(command=("c++",), version="1", machine="aarch64-linux-gnu", openmp=False)
    with pytest.raises(ToolchainError, match="aarch64"):
        toolchain.compile_library(SMALL, "avx2", tmp_path / "x.so", compiler=arm)


def test_every_level_compiles(tmp_path: Path, compiler: toolchain.Compiler) -> None:
    """Also those that this machine cannot run."""
    source = '#include "llmc_cpu.hpp"\nLLMC_EXPORT int32_t llmc_step(const llmc_model*, const llmc_step_args*) { return 0; }\n'
    built = toolchain.compile_levels(source, tmp_path, compiler=compiler)
    assert tuple(built) == compiler.levels
