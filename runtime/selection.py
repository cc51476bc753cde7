"""Chooses which target of a bundle runs here and with which executor, and keeps the reasons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from ..errors import BundleError, MissingExtraError, UsageError
from .devices import INSTALL_CUDA, CudaDevice, CudaSurvey, parse_arch

ExecutorName = Literal["auto", "cpu", "cuda", "interpreter"]
EXECUTORS: tuple[ExecutorName, ...] = ("auto", "cpu", "cuda", "interpreter")
_BACKENDS = {"auto": ("cuda", "cpu"), "cpu": ("cpu",), "cuda": ("cuda",), "interpreter": ("cuda", "rocm")}
_SLOWLY = "use executor='interpreter' (--executor interpreter), which is slow"
_OTHER = {
    "cpu": "compile a cpu target, too",
    "cuda": "compile a target for an NVIDIA device, too",
    "interpreter": "leave the executor out",
}
_AFTER_GPUS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A target of the bundle: its backend and what its code is built for, or why its program cannot be read."""

    target: str
    backend: str = ""
    machine: str = ""
    unreadable: BundleError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The target to run, with which executor, and on which device if that is a CUDA one; `description` says why, in a line."""

    target: str
    executor: Literal["cpu", "cuda", "interpreter"]
    device: CudaDevice | None = None
    description: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """What there is to run on: `processor` such as `x86_64-linux`, and the NVIDIA devices, looked for only if needed."""

    processor: str
    survey_cuda: Callable[[], CudaSurvey]


class _RefusalError(Exception):
    """Why a target does not run here, and what would help."""

    def __init__(self, reason: str, *fixes: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.fixes = fixes


def choose(candidates: Sequence[Candidate], executor: ExecutorName, here: Here, where: str) -> Choice:
    """The target to run among `candidates`, which are in the bundle's order.

    CUDA targets come first, among them the one whose architecture is closest to the device's; then CPU targets. Targets
    for GPUs are interpreted only if `executor` is "interpreter". Raises BundleError if none runs here, UsageError for an
    unknown executor, MissingExtraError where only cuda.core is missing.
    """
    if executor not in EXECUTORS:
        raise UsageError(f"executor={executor!r}: expected one of {', '.join(EXECUTORS)}")
    looks = executor in ("auto", "cuda") and any(candidate.backend == "cuda" for candidate in candidates)
    survey = here.survey_cuda() if looks else CudaSurvey()
    fits: list[tuple[int, Candidate, CudaDevice | None]] = []
    refusals: dict[str, _RefusalError] = {}
    for candidate in candidates:
        try:
            rank, device = _fit(candidate, executor, here.processor, survey)
        except _RefusalError as refusal:
            refusals[candidate.target] = refusal
        else:
            fits.append((rank, candidate, device))
    if not fits:
        if survey.missing_extra:
            raise MissingExtraError(
                f"{where}: CUDA targets need the package cuda.core, which is not installed; run: {INSTALL_CUDA}"
            )
        raise _nothing_runs(candidates, refusals, where)
    _, best, device = min(fits, key=lambda fit: fit[0])
    place = device.description if device else here.processor
    if executor == "interpreter":
        place = f"Triton's interpreter, {place}"
    others = [
        f"{candidate.target}: {refusals[candidate.target].reason if candidate.target in refusals else 'runs here, too'}"
        for candidate in candidates
        if candidate is not best
    ]
    why = f": the first of {len(candidates)} that runs here; {'; '.join(others)}" if others else ""
    return Choice(
        target=best.target,
        executor="interpreter" if executor == "interpreter" else "cuda" if best.backend == "cuda" else "cpu",
        device=device,
        description=f"target {best.target} on {place}{why}",
    )


def _fit(candidate: Candidate, executor: ExecutorName, processor: str, survey: CudaSurvey) -> tuple[int, CudaDevice | None]:
    """`(rank, device)` of a target that runs here, the lowest rank first; raises _RefusalError."""
    backend, machine = candidate.backend, candidate.machine
    if candidate.unreadable is not None:
        raise _RefusalError(str(candidate.unreadable), "copy the bundle again")
    if backend not in _BACKENDS[executor]:
        if backend == "rocm":
            raise _RefusalError("is for ROCm, for which this version of llmc has no executor", _SLOWLY)
        raise _RefusalError(f"is for {backend}, which executor={executor!r} does not run", _OTHER[executor])
    if executor == "interpreter":
        return 0, None
    if backend == "cpu":
        if machine != processor:
            raise _RefusalError(f"is for {machine}; this machine is {processor}", "compile the model on such a one")
        return _AFTER_GPUS, None
    if not survey.devices:
        raise _RefusalError(f"is for an NVIDIA GPU, but {survey.problem}", _OTHER["cpu"], _SLOWLY)
    devices = [device for device in survey.devices if device.runs(machine)]
    if not devices:
        found = ", ".join(device.description for device in survey.devices)
        raise _RefusalError(f"is for {machine}, which {found} does not run", "compile for it", _SLOWLY)
    built = parse_arch(machine)
    assert built is not None  # or no device would run it
    best = min(devices, key=lambda device: device.capability[1])  # the first of those closest to what was built
    return best.capability[1] - built[1], best


def _nothing_runs(candidates: Sequence[Candidate], refusals: dict[str, _RefusalError], where: str) -> BundleError:
    if len(candidates) == 1:
        if candidates[0].unreadable is not None:
            return candidates[0].unreadable
        refusal = refusals[candidates[0].target]
        return BundleError(f"{where}: target {candidates[0].target!r} {refusal.reason}; {', or '.join(refusal.fixes)}")
    reasons = "; ".join(f"{name!r} {refusal.reason}" for name, refusal in refusals.items())
    fixes = dict.fromkeys(fix for refusal in refusals.values() for fix in refusal.fixes)
    return BundleError(f"{where}: no target runs here: {reasons}; {', or '.join(fixes)}")
