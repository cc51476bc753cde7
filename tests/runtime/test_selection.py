"""Which target runs, with which executor, and what the user is told: over machines that are made up."""

from __future__ import annotations

import pytest
from llmc.errors import BundleError, LlmcError, MissingExtraError, UsageError
from llmc.runtime.devices import CudaDevice, CudaSurvey, parse_arch
from llmc.runtime.selection import Candidate, Choice, ExecutorName, Here, choose

H100 = CudaDevice(ordinal=0, name="NVIDIA H100", capability=(9, 0))
A10 = CudaDevice(ordinal=1, name="NVIDIA A10", capability=(8, 6))
L40S = CudaDevice(ordinal=2, name="NVIDIA L40S", capability=(8, 9))
NO_DRIVER = CudaSurvey(problem="no NVIDIA driver is installed here")
BUNDLE = {
    "a100-int8": ("cuda", "sm_80"),
    "l40s-fp8": ("cuda", "sm_89"),
    "cpu-int8": ("cpu", "x86_64-linux"),
    "h100-fp8": ("cuda", "sm_90"),
    "mi300x-fp8": ("rocm", "gfx942"),
    "cpu-f32": ("cpu", "x86_64-linux"),
}


def pick(
    *targets: str, executor: ExecutorName = "auto", devices: tuple[CudaDevice, ...] = (), survey: CudaSurvey | None = None
) -> Choice:
    found = survey or (CudaSurvey(devices=devices) if devices else NO_DRIVER)
    here = Here(processor="x86_64-linux", survey_cuda=lambda: found)
    return choose(
        [Candidate(target=name, backend=BUNDLE[name][0], machine=BUNDLE[name][1]) for name in targets], executor, here, "b"
    )


@pytest.mark.parametrize(
    ("devices", "executor", "target", "ordinal"),
    [
        ((), "auto", "cpu-int8", None),
        ((H100,), "auto", "h100-fp8", 0),
        ((A10,), "auto", "a100-int8", 1),
        ((L40S,), "auto", "l40s-fp8", 2),
        ((L40S, A10), "auto", "l40s-fp8", 2),
        ((A10, H100), "auto", "h100-fp8", 0),
        ((H100,), "cpu", "cpu-int8", None),
        ((H100,), "cuda", "h100-fp8", 0),
        ((), "interpreter", "a100-int8", None),
    ],
)
def test_the_closest_architecture_then_the_cpu(
    devices: tuple[CudaDevice, ...], executor: ExecutorName, target: str, ordinal: int | None
) -> None:
    choice = pick(*BUNDLE, executor=executor, devices=devices)
    assert choice.target == target
    assert (choice.device.ordinal if choice.device else None) == ordinal
    assert choice.executor == (executor if executor != "auto" else "cpu" if ordinal is None else "cuda")


def test_the_choice_is_explained() -> None:
    choice = pick("a100-int8", "h100-fp8", "cpu-int8", "mi300x-fp8", devices=(H100,))
    assert choice.description == (
        "target h100-fp8 on NVIDIA H100 (sm_90): the first of 4 that runs here; a100-int8: is for sm_80, which NVIDIA H100 (sm_90) "
        "does not run; cpu-int8: runs here, too; mi300x-fp8: is for ROCm, for which this version of llmc has no executor"
    )
    assert pick("cpu-int8").description == "target cpu-int8 on x86_64-linux"
    assert pick("h100-fp8", executor="interpreter").description == "target h100-fp8 on Triton's interpreter, x86_64-linux"


SLOWLY = "use executor='interpreter' (--executor interpreter), which is slow"


@pytest.mark.parametrize(
    ("targets", "executor", "devices", "text"),
    [
        (
            ["h100-fp8"], "auto", (),
            f"b: target 'h100-fp8' is for an NVIDIA GPU, but no NVIDIA driver is installed here; compile a cpu target, too, or {SLOWLY}",
        ),
        (
            ["h100-fp8"], "auto", (A10, L40S),
            "b: target 'h100-fp8' is for sm_90, which NVIDIA A10 (sm_86), NVIDIA L40S (sm_89) does not run; compile for it, or "
            f"{SLOWLY}",
        ),
        (
            ["mi300x-fp8"], "auto", (H100,),
            f"b: target 'mi300x-fp8' is for ROCm, for which this version of llmc has no executor; {SLOWLY}",
        ),
        (["cpu-int8"], "cuda", (H100,), "b: target 'cpu-int8' is for cpu, which executor='cuda' does not run; compile a target for an "
            "NVIDIA device, too"),
        (["cpu-int8", "cpu-f32"], "interpreter", (), "b: no target runs here: 'cpu-int8' is for cpu, which executor='interpreter' does "
            "not run; 'cpu-f32' is for cpu, which executor='interpreter' does not run; leave the executor out"),
        (
            ["h100-fp8", "mi300x-fp8"], "auto", (),
            "b: no target runs here: 'h100-fp8' is for an NVIDIA GPU, but no NVIDIA driver is installed here; 'mi300x-fp8' is for ROCm, "
            f"for which this version of llmc has no executor; compile a cpu target, too, or {SLOWLY}",
        ),
    ],
)  # fmt: skip
def test_nothing_runs(targets: list[str], executor: ExecutorName, devices: tuple[CudaDevice, ...], text: str) -> None:
    with pytest.raises(BundleError) as caught:
        pick(*targets, executor=executor, devices=devices)
    assert str(caught.value) == text


def test_only_the_package_is_missing() -> None:
    survey = CudaSurvey(problem="cuda.core is not installed: pip install 'llmc[cuda]'", missing_extra=True)
    for executor in ("auto", "cuda"):
        with pytest.raises(MissingExtraError, match=r"cuda\.core, which is not installed; run: pip install 'llmc\[cuda\]'"):
            pick("h100-fp8", executor=executor, survey=survey)
    choice = pick("h100-fp8", "cpu-int8", survey=survey)
    assert choice.target == "cpu-int8"
    assert "h100-fp8: is for an NVIDIA GPU, but cuda.core is not installed: pip install 'llmc[cuda]'" in choice.description


def test_devices_are_looked_for_only_if_they_matter() -> None:
    def survey() -> CudaSurvey:
        raise AssertionError("looked for devices")

    here = Here(processor="x86_64-linux", survey_cuda=survey)
    cpu, gpu = (
        Candidate(target="c", backend="cpu", machine="x86_64-linux"),
        Candidate(target="g", backend="cuda", machine="sm_90"),
    )
    assert choose([cpu], "auto", here, "b").target == "c"
    assert choose([gpu, cpu], "cpu", here, "b").target == "c"
    assert choose([gpu, cpu], "interpreter", here, "b").target == "g"
    with pytest.raises(UsageError, match="executor='gpu': expected one of auto, cpu, cuda, interpreter"):
        choose([cpu], "gpu", here, "b")  # type: ignore[arg-type]


def test_an_unreadable_target_is_passed_over_unless_it_is_the_only_one() -> None:
    here = Here(processor="x86_64-linux", survey_cuda=lambda: NO_DRIVER)
    broken = Candidate(target="a", unreadable=BundleError("a/program.json: damaged"))
    cpu = Candidate(target="c", backend="cpu", machine="x86_64-linux")
    assert "a: a/program.json: damaged" in choose([broken, cpu], "auto", here, "b").description
    with pytest.raises(BundleError, match=r"^a/program\.json: damaged$"):
        choose([broken], "auto", here, "b")
    foreign = Candidate(target="d", backend="cpu", machine="aarch64-linux")
    with pytest.raises(
        LlmcError, match=r"'a' a/program\.json: damaged; 'd' is for aarch64-linux; this machine is x86_64-linux"
    ):
        choose([broken, foreign], "auto", here, "b")


@pytest.mark.parametrize(
    ("arch", "capability", "runs"),
    [
        ("sm_80", (8, 0), True), ("sm_80", (8, 6), True), ("sm_80", (8, 9), True), ("sm_80", (9, 0), False), ("sm_89", (8, 9), True),
        ("sm_89", (8, 6), False), ("sm_89", (9, 0), False), ("sm_90", (9, 0), True), ("sm_90", (8, 9), False), ("sm_90", (10, 0), False),
        ("sm_100", (10, 0), True), ("sm_100", (10, 3), False), ("sm_100", (9, 0), False), ("gfx942", (9, 0), False), ("", (8, 0), False),
    ],
)  # fmt: skip
def test_binaries_and_devices(arch: str, capability: tuple[int, int], runs: bool) -> None:
    assert CudaDevice(ordinal=0, name="x", capability=capability).runs(arch) == runs


def test_architectures() -> None:
    assert [parse_arch(arch) for arch in ("sm_80", "sm_90a", "sm_100", "sm_120f", "sm_9", "x86_64", "sm_90 ")] == [
        (8, 0), (9, 0), (10, 0), (12, 0), None, None, None,
    ]  # fmt: skip
