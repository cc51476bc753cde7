"""Which library of a CPU program is used, and what happens when none can be."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import llmc
import pytest
from llmc.errors import BundleError, CapacityError, UsageError
from llmc.runtime.executor.cpu import CpuExecutor

AVX512 = {"TOY_LEVEL": 2}
Build = Callable[..., Path]


def level_of(bundle: Path, level: str | None = None) -> str:
    with llmc.load(bundle, level=level) as engine:
        assert isinstance(engine.executor, CpuExecutor)
        assert engine.generate([5]).token_ids
        return engine.executor.level


def test_the_highest_level_of_machine_and_bundle(build_bundle: Build, tmp_path: Path) -> None:
    levels = {"portable": AVX512, "avx2": {}, "avx512": {"TOY_LEVEL": 9}, "amx": {}}
    bundle = build_bundle(tmp_path / "b", libraries=levels)
    assert level_of(bundle) == "avx512"
    assert level_of(bundle, "avx2") == "avx2"
    with pytest.raises(UsageError, match="level 'amx' cannot be used; this machine and bundle have avx512, avx2"):
        level_of(bundle, "amx")
    del levels["avx512"]
    assert level_of(build_bundle(tmp_path / "c", libraries=levels)) == "avx2"


def test_a_level_that_fails_its_self_test_is_passed_over(
    build_bundle: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    levels = {"portable": AVX512, "avx2": {"TOY_SELF_TEST": 3}, "avx512": {"TOY_SELF_TEST": -1}}
    with caplog.at_level(logging.WARNING, "llmc.runtime"):
        assert level_of(build_bundle(tmp_path / "b", libraries=levels)) == "portable"
    assert caplog.messages == ["using the portable kernels: avx512 raised SIGILL; avx2 failed its self test 3"]


def test_no_level_works(build_bundle: Build, tmp_path: Path) -> None:
    bundle = build_bundle(tmp_path / "b", libraries={"portable": {"TOY_SELF_TEST": 5}})
    with pytest.raises(BundleError, match="no library of target 'cpu-f32' works here: portable failed its self test 5"):
        llmc.load(bundle)


def test_wrong_abi_and_level(build_bundle: Build, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"libportable\.so: abi_version is 3, this runtime calls 2; upgrade llmc"):
        llmc.load(build_bundle(tmp_path / "b", libraries={"portable": {"TOY_ABI": 3}}))
    with pytest.raises(BundleError, match="llmc_cpu_level returned 7"):
        llmc.load(build_bundle(tmp_path / "c", libraries={"portable": {"TOY_LEVEL": 7}}))


def test_a_refused_step_names_the_code(build_bundle: Build, tmp_path: Path) -> None:
    """program.json claims a larger vocabulary than the library has."""
    with (
        llmc.load(build_bundle(tmp_path / "b", program_changes={"vocab_size": 301})) as engine,
        pytest.raises(BundleError, match=r"refused a step of 2 tokens: code 3 \(a token id out of range\)"),
    ):
        engine.generate([5, 300])


def test_threads(toy_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMC_NUM_THREADS", "3")
    with llmc.load(toy_bundle) as engine:
        assert engine.executor.description == "cpu (portable, 3 threads)"
    with llmc.load(toy_bundle, num_threads=1) as engine:
        assert engine.executor.description == "cpu (portable, 1 thread)"
    monkeypatch.setenv("LLMC_NUM_THREADS", "0")
    with pytest.raises(UsageError, match="LLMC_NUM_THREADS='0': out of range"):
        llmc.load(toy_bundle)


def test_pool_sizes(toy_bundle: Path) -> None:
    with llmc.load(toy_bundle, max_num_seqs=3) as engine:
        assert engine.pool.num_blocks == 3 * 256 // 16
    with llmc.load(toy_bundle, kv_cache_bytes=1000) as engine:
        assert engine.pool.num_blocks == 7
    with pytest.raises(CapacityError, match="kv_cache_bytes=127 is less than one KV block of 128 bytes"):
        llmc.load(toy_bundle, kv_cache_bytes=127)
    with pytest.raises(UsageError, match="max_num_seqs=0"):
        llmc.load(toy_bundle, max_num_seqs=0)
    with pytest.raises(CapacityError, match=r"cannot allocate \d+ bytes for the KV pool"):
        llmc.load(toy_bundle, kv_cache_bytes=1 << 60)


def test_memory_is_only_touched_when_used(toy_bundle: Path) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident()
    with llmc.load(toy_bundle, kv_cache_bytes=8 << 30) as engine:
        engine.generate([5] * 200)
        assert resident() - before < 64 << 20
