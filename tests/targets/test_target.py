"""Target names and device files."""

from __future__ import annotations

from pathlib import Path

import pytest
from llmc.errors import TargetError
from llmc.targets import list_targets, resolve_target

GPU = """
name = "mygpu"
vendor = "nvidia"
backend = "cuda"
arch = "sm_90"
schemes = ["bf16", "fp8"]
default_scheme = "fp8"
features = ["tma"]
memory_bytes = 80_000_000_000
memory_bandwidth_bytes_per_s = 3.35e12
peak_ops_per_s = { bf16 = 989e12, fp8 = 1979e12 }
num_processors = 132
shared_memory_per_block_bytes = 232_448
"""


def test_every_listed_name_resolves_to_itself() -> None:
    targets = list_targets()
    assert len({target.name for target in targets}) == len(targets) > 0
    for target in targets:
        assert resolve_target(target.name) == target
        assert target.supports(target.scheme)


def test_capabilities() -> None:
    target = resolve_target("cpu-int8")
    assert (target.device.name, target.scheme, target.backend) == ("cpu", "int8", "cpu")
    assert target.supports("int4")
    assert target.supports("amx")
    assert not target.supports("fp8")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("cup-int8", "did you mean 'cpu-int8'"),
        ("warp", "unknown target 'warp'; Valid: a100-{bf16,int8,int4}, b200-{bf16"),
        ("cpu", "unknown target 'cpu'"),
        ("", "unknown target ''"),
        ("cpu-int9", "device 'cpu' has no scheme 'int9'; it has f32, bf16, fp16, int8, int6, int5, int4, int3"),
        ("nowhere.toml", "device file nowhere.toml: No such file"),
    ],
)
def test_unknown_names(name: str, text: str) -> None:
    with pytest.raises(TargetError) as caught:
        resolve_target(name)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_device_file_works_wherever_a_name_does(tmp_path: Path) -> None:
    path = tmp_path / "mygpu.toml"
    path.write_text(GPU)
    target = resolve_target(path)
    assert (target.name, target.backend, target.device.arch) == ("mygpu-fp8", "cuda", "sm_90")
    assert target.device.peak_ops_per_s["bf16"] == 989e12
    assert target.supports("tma")
    assert resolve_target(str(path)) == target


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ('arch = "sm_90"\n', "", "arch"),
        ("num_processors", "num_procesors", "num_procesors"),
        ("memory_bytes = 80_000_000_000", 'memory_bytes = "80 GB"', "memory_bytes"),
        ("memory_bytes = 80_000_000_000", "memory_bytes = -1", "memory_bytes"),
        ('default_scheme = "fp8"', "", 'no default_scheme; add default_scheme = "bf16"'),
        ('default_scheme = "fp8"', 'default_scheme = "int8"', "'int8' is not among schemes"),
        ('name = "mygpu"', 'name = "../gpu"', "name"),
        ('["bf16", "fp8"]', "[]", "schemes"),
        ("name =", "name", "device file"),
    ],
)
def test_bad_device_files(tmp_path: Path, old: str, new: str, text: str) -> None:
    assert old in GPU
    path = tmp_path / "bad.toml"
    path.write_text(GPU.replace(old, new, 1))
    with pytest.raises(TargetError) as caught:
        resolve_target(path)
    assert text in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_gpu_states_its_facts_and_their_sources() -> None:
    """What tiles, floors and checks are made of."""
    gpus = {target.device.name: target for target in list_targets() if target.backend != "cpu"}
    assert set(gpus) == {"h100", "h200", "a100", "rtx4090", "l40s", "b200", "mi300x"}
    for target in gpus.values():
        device = target.device
        assert device.sources, device.name
        assert device.memory_bytes
        assert device.memory_bandwidth_bytes_per_s
        assert device.num_processors
        assert device.shared_memory_per_block_bytes
        rates = {"bf16": "bf16", "int4": "bf16"}  # int4 weights are multiplied in bf16
        assert {rates.get(scheme, scheme) for scheme in device.schemes} == set(device.peak_ops_per_s)
        assert target.supports("fp8") == ("fp8" in device.peak_ops_per_s)
    assert not gpus["a100"].supports("fp8")
