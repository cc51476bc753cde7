"""What a compile was asked for, validated before anything is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..errors import TargetError, UsageError
from ..passes.quantize import FORMATS, QuantizeOptions
from ..runtime.program import CPU_LEVELS, Scheme
from ..targets import Target, resolve_target

DEFAULT_TARGET = "cpu-int8"
DEFAULT_MAX_TOKENS = 512
_HEAD = "int8-g32"  # of every integer quantization but int8-channel: errors in the head reach the logits undamped
_QUANTIZATIONS = {
    "f32": QuantizeOptions(weights="f32", head="f32"),
    "bf16": QuantizeOptions(weights="bf16", head="bf16"),
    "int8": QuantizeOptions(weights="int8-g128", head=_HEAD),
    "int4": QuantizeOptions(weights="int4-g32", head=_HEAD),
    "int8-channel": QuantizeOptions(weights="int8", head="int8"),
    **{f: QuantizeOptions(weights=f, head=_HEAD) for f in FORMATS if "-g" in f},
}
QUANTIZATIONS = tuple(_QUANTIZATIONS)
NATIVE = "native"  # the highest level of the compiling machine
KV_DTYPES = ("auto", "bf16", "f32")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOptions:
    """Options of `llmc compile`; see its help for what each does."""

    model: str
    target: str = DEFAULT_TARGET
    output: Path | None = None
    quantization: str | None = None
    kv_dtype: str = "auto"
    config: Path | None = None
    num_layers: int | None = None
    max_tokens: int = DEFAULT_MAX_TOKENS
    cpu_levels: tuple[str, ...] | None = None
    dump_ir: Path | None = None
    verify_each: float | None = None
    stop_after: str | None = None
    dry_run: bool = False

    def __post_init__(self) -> None:
        if self.quantization is not None and self.quantization not in QUANTIZATIONS:
            raise UsageError(f"quantization {self.quantization!r} is unknown; choose one of {', '.join(QUANTIZATIONS)}")
        if self.kv_dtype not in KV_DTYPES:
            raise UsageError(f"kv dtype {self.kv_dtype!r} is unknown; choose one of {', '.join(KV_DTYPES)}")
        if self.num_layers is not None and self.num_layers < 1:
            raise UsageError(f"num layers is {self.num_layers}, expected at least 1")
        if not 16 <= self.max_tokens <= 8192:
            raise UsageError(f"max tokens is {self.max_tokens}, expected 16 to 8192 tokens a step")
        for level in self.cpu_levels or ():
            if level not in (*CPU_LEVELS, NATIVE):
                raise UsageError(f"cpu level {level!r} is unknown; choose from {', '.join(CPU_LEVELS)} and {NATIVE}")
        if self.verify_each is not None and not self.verify_each > 0:
            raise UsageError(f"verify tolerance is {self.verify_each}, expected more than 0")

    def resolve_target(self) -> Target:
        """The target, with the scheme that `quantization` asks for. Raises `TargetError`."""
        target = resolve_target(self.target)
        if target.backend != "cpu":
            raise TargetError(f"target {target.name!r} has backend {target.backend!r}; this version generates code for: cpu")
        if self.quantization is None and target.scheme not in _QUANTIZATIONS:
            raise TargetError(
                f"target {target.name!r}: scheme {target.scheme!r} has no CPU kernels; there are {', '.join(QUANTIZATIONS)}"
            )
        if self.quantization is None:
            return target
        scheme = self.quantization.split("-")[0]
        if not target.supports(scheme):
            raise TargetError(
                f"device {target.device.name!r} does not run {scheme!r}; it runs {', '.join(target.device.schemes)}"
            )
        return Target(device=target.device, scheme=scheme)

    def quantize_options(self, target: Target) -> QuantizeOptions:
        """Formats of the matrices: those that `quantization` names, or else the target's scheme."""
        return _QUANTIZATIONS[self.quantization or target.scheme]

    def scheme(self, target: Target) -> Scheme:
        """The number formats as program.json names them; KV is bf16 unless everything is f32."""
        options = self.quantize_options(target)
        group = options.weights.partition("-g")[2]
        kv = self.kv_dtype if self.kv_dtype != "auto" else ("f32" if target.scheme == "f32" else "bf16")
        return Scheme(
            weights=options.weights.split("-")[0],
            head=options.head,
            group_size=int(group) if group else None,
            kv=kv,
        )
