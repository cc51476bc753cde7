"""What a compile was asked for, validated before anything is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..codegen import Backend, ProgramOptions, make_backend
from ..environment import CACHE
from ..errors import TargetError, UsageError
from ..passes.quantize import FLOATS
from ..quantization.method import Method
from ..runtime.program import CPU_LEVELS
from ..runtime.program import KV_DTYPES as STORED_KV_DTYPES
from ..targets import Target, resolve_target
from .checkpoint import Checkpoint
from .stored_formats import STORED

DEFAULT_TARGET = "cpu-int8"
NATIVE = "native"  # the highest level of the compiling machine
AUTO = "auto"  # KV dtypes by measurement
KV_DTYPES = (AUTO, *STORED_KV_DTYPES)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationOptions:
    """How weights are quantised where rounding each to nearest is not enough; see the help of `llmc compile`."""

    method: str | None = None
    calibration: Path | None = None
    calibration_samples: int = 128
    calibration_length: int = 512
    memory_budget: int | None = None
    max_kl: float | None = None
    static_activations: bool = False
    max_build_memory: int | None = None
    resume: bool = False

    def __post_init__(self) -> None:
        if self.method is not None:
            Method.parse(self.method)
        if self.calibration_samples < 1:
            raise UsageError(f"calibration samples is {self.calibration_samples}, expected at least 1")
        if not 16 <= self.calibration_length <= 32768:
            raise UsageError(f"calibration length is {self.calibration_length}, expected 16 to 32768 tokens")
        if self.memory_budget is not None and self.memory_budget < 1:
            raise UsageError(f"memory budget is {self.memory_budget} bytes, expected at least 1")
        if self.max_kl is not None and not self.max_kl > 0:
            raise UsageError(f"max KL is {self.max_kl}, expected more than 0 nats")

    @property
    def calibrates(self) -> bool:
        """Whether the weights ask for it: by a method that looks at activations, or to keep to a limit."""
        by_method = self.method is not None and Method.parse(self.method).needs_calibration
        limited = any(value is not None for value in (self.calibration, self.memory_budget, self.max_kl))
        return by_method or limited or self.static_activations


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOptions:
    """Options of `llmc compile`; see its help for what each does."""

    model: str
    target: str = DEFAULT_TARGET
    output: Path | None = None
    quantization: str | None = None
    prefill_quantization: str | None = None
    kv_dtype: str | None = None
    quantize: QuantizationOptions = QuantizationOptions()
    config: Path | None = None
    num_layers: int | None = None
    max_tokens: int | None = None
    cpu_levels: tuple[str, ...] | None = None
    dump_ir: Path | None = None
    verify_each: float | None = None
    stop_after: str | None = None
    dry_run: bool = False

    def __post_init__(self) -> None:
        if self.kv_dtype not in (None, *KV_DTYPES):
            raise UsageError(f"kv dtype {self.kv_dtype!r} is unknown; choose one of {', '.join(KV_DTYPES)}")
        if self.num_layers is not None and self.num_layers < 1:
            raise UsageError(f"num layers is {self.num_layers}, expected at least 1")
        if self.max_tokens is not None and not 16 <= self.max_tokens <= 32768:
            raise UsageError(f"max tokens is {self.max_tokens}, expected 16 to 32768 tokens a step")
        for level in self.cpu_levels or ():
            if level not in (*CPU_LEVELS, NATIVE):
                raise UsageError(f"cpu level {level!r} is unknown; choose from {', '.join(CPU_LEVELS)} and {NATIVE}")
        if self.verify_each is not None and not self.verify_each > 0:
            raise UsageError(f"verify tolerance is {self.verify_each}, expected more than 0")

    @property
    def calibrates(self) -> bool:
        """Whether the model has to be run: for a method that looks at activations, to choose KV dtypes, or to keep to a limit."""
        return self.quantize.calibrates or self.kv_dtype == AUTO

    def keeps_stored(self, checkpoint: Checkpoint, backend: Backend) -> bool:
        """Whether a quantised checkpoint's formats are kept: if asked for, and for Hugging Face folders where a target has fewer than
        16 bits and no other format is asked for."""
        if self.quantization == STORED and checkpoint.quantization is None:
            raise UsageError(f"--quantization {STORED}: {checkpoint.path} is not quantised; name a format")
        if self.quantization is not None:
            return self.quantization == STORED
        is_folder = checkpoint.path.is_dir() and checkpoint.quantization is not None
        return is_folder and backend.quantization.weights not in FLOATS

    def backends(self) -> list[Backend]:
        """A code generator for each target, in the order given. Raises `TargetError` and `UsageError`."""
        options = self.program_options()
        backends = [make_backend(self._with_quantization(target), options) for target in self._targets()]
        names = [backend.target.name for backend in backends]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise TargetError(f"target {twice[0]!r} is given twice; a bundle holds each target once")
        method = Method.parse(self.quantize.method) if self.quantize.method else None
        if method is not None and method.equalisation and len(names) > 1:
            raise UsageError(
                f"method {method} moves scales into weights that {names[0]} and {names[1]} would share; compile one target at a time"
            )
        return backends

    def program_options(self) -> ProgramOptions:
        """What every target's program is asked for."""
        return ProgramOptions(
            quantization=None if self.quantization == STORED else self.quantization,
            prefill_quantization=self.prefill_quantization,
            kv_dtype=None if self.kv_dtype == AUTO else self.kv_dtype,
            max_tokens=self.max_tokens,
            cpu_levels=self.cpu_levels,
            cache=CACHE.get(),
        )

    def _targets(self) -> list[Target]:
        return [resolve_target(name.strip()) for name in self.target.split(",")]

    def _with_quantization(self, target: Target) -> Target:
        """The target with the scheme that `quantization` asks for: `int4-g64` is scheme `int4`."""
        if self.quantization in (None, STORED):
            return target
        scheme = self.quantization.split("-")[0]
        if not target.supports(scheme):
            raise TargetError(
                f"device {target.device.name!r} does not run {self.quantization!r}; it runs {', '.join(target.device.schemes)}"
            )
        return Target(device=target.device, scheme=scheme)
