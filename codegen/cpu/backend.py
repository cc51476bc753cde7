"""The CPU code generator: number formats, passes, lowering to C++ and the libraries of every instruction-set level."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torch import fx

from ...errors import TargetError, ToolchainError
from ...formats.floats import Array
from ...formats.grid import BITS, GROUP_SIZES, Grid
from ...passes.base import Pass
from ...passes.pipelines import cpu_pipeline
from ...passes.plan_memory import RowLayout
from ...passes.quantize import QuantizeOptions
from ...passes.quantize_kv import KvOptions
from ...runtime.program import CPU_LEVELS, Scheme, encode_program
from ...targets import Target
from ..backend import ModelShape, ProgramOptions
from .formats import MatrixFormat, decode_matrix
from .packing import operand_row_bytes
from .program import LoweredCpu, lower
from .toolchain import Compiler, compile_levels, find_compiler

DEFAULT_MAX_TOKENS = 512
NATIVE = "native"  # the highest level of the compiling machine
_HEAD = "int8-g32"  # of every integer quantization but int8-channel: errors in the head reach the logits undamped
_GRIDS = [
    Grid(bits=bits, group=group, symmetric=symmetric) for symmetric in (True, False) for bits in BITS for group in GROUP_SIZES
]
QUANTIZATIONS = {
    "f32": QuantizeOptions(weights="f32", head="f32"),
    "bf16": QuantizeOptions(weights="bf16", head="bf16"),
    "fp16": QuantizeOptions(weights="f16", head="f16"),
    "int8": QuantizeOptions(weights="int8-g128", head=_HEAD),
    **{f"int{bits}": QuantizeOptions(weights=f"int{bits}-g32", head=_HEAD) for bits in BITS if bits < 8},
    "int8-channel": QuantizeOptions(weights="int8", head="int8"),
    **{str(grid): QuantizeOptions(weights=str(grid), head=_HEAD) for grid in _GRIDS},
}

CANDIDATES = (*(f"int{bits}-g{group}" for bits in BITS for group in (32, 64)), "int8-g128", "bf16")


class CpuBackend:
    """A `Backend`."""

    def __init__(self, target: Target, options: ProgramOptions) -> None:
        """Raises `TargetError` and `UsageError` for options that CPUs cannot serve."""
        name = options.quantization or target.scheme
        if name not in QUANTIZATIONS:
            short = [known for known in QUANTIZATIONS if "-g" not in known]
            raise TargetError(
                f"target {target.name!r}: {name!r} has no CPU kernels; there are {', '.join(short)}, and int<bits>-g<group> with or "
                f"without -asym, with {', '.join(map(str, BITS))} bits and groups of {', '.join(map(str, GROUP_SIZES))}"
            )
        self.target = target
        self.quantization = replace(QUANTIZATIONS[name], overrides=options.formats)
        self.prefill = _prefill(target, options.prefill_quantization)
        self.kv = _kv_options(self.quantization, options)
        self.options = options
        self.max_tokens = options.max_tokens or DEFAULT_MAX_TOKENS
        self._compiler: Compiler | None = None

    @property
    def candidates(self) -> tuple[str, ...]:
        """Grids that no other matches in bytes with less error, and bf16."""
        return CANDIDATES

    def format_for(self, stored: str) -> str | None:
        """Every grid has a format of the same name; fp8 has none."""
        return stored if Grid.parse(stored) else None

    @property
    def kv_candidates(self) -> tuple[str, ...]:
        """All packed dtypes, and bf16."""
        return ("int4", "int8", "bf16")

    def check(self) -> dict[str, str]:
        """Find the C++ compiler. Raises `ToolchainError`."""
        self._compiler = find_compiler()
        return {"compiler": self._compiler.version}

    def notes(self) -> list[str]:
        """A compiler without OpenMP is worth a note."""
        compiler = self._compiler
        if compiler is None or compiler.openmp:
            return []
        return [f"{compiler.version} has no OpenMP: the libraries run on one thread; install g++ for more"]

    def pipeline(self) -> tuple[Pass, ...]:
        """The passes."""
        phases = {"prefill": self.max_tokens, "decode": self.max_tokens}
        return cpu_pipeline(quantization=self.quantization, prefill=self.prefill, kv=self.kv, max_tokens=phases, storage=row_layout)

    def decode_matrix(self, value: Array, format: str) -> Array:
        """A float32 matrix as it comes back after being stored in `format`."""
        return decode_matrix(value, format)

    def lower(self, module: fx.GraphModule, model: ModelShape) -> CpuBuild:
        """The program in C++."""
        lowered = lower(module, model=model, target=self.target.name, scheme=self.scheme(), max_tokens=self.max_tokens)
        return CpuBuild(lowered, self.options, lambda: self._compiler or find_compiler())

    def scheme(self) -> Scheme:
        """The number formats as program.json names them."""
        formats = self.quantization
        weights = formats.weights
        group = MatrixFormat.parse(weights).group
        kv = self.kv.formats[0] if len(set(self.kv.formats)) == 1 else "mixed"
        weights = weights.replace(f"-g{group}", "")
        if set(formats.overrides.values()) - {formats.weights, formats.head}:
            weights, group = "mixed", None
        return Scheme(weights=weights, head=formats.head, group_size=group, kv=kv)


class CpuBuild:
    """A `LoweredProgram`: generated C++ and what becomes of it."""

    def __init__(self, lowered: LoweredCpu, options: ProgramOptions, compiler: Callable[[], Compiler]) -> None:
        self._lowered = lowered
        self._source = lowered.source()
        self._options = options
        self._compiler = compiler
        self.weights = lowered.weights
        self.arena_bytes = lowered.arena_bytes
        self.kv_cache = lowered.kv_cache

    def num_calls(self) -> dict[str, int]:
        """Kernel calls of each phase."""
        return {name: len(calls) for name, calls in self._lowered.phases.items()}

    def floors(self) -> list[dict[str, object]]:
        """Nothing: CPUs of one target differ."""
        return []

    def build(self, folder: Path, on_kernel: Callable[[str], object]) -> dict[str, int]:
        """Write program.cpp, the libraries and program.json. Raises `ToolchainError`."""
        compiler = self._compiler()
        (folder / "program.cpp").write_text(self._source)
        libraries = self._libraries(folder, compiler)
        names = {level: path.name for level, path in libraries.items()}
        (folder / "program.json").write_bytes(encode_program(self._lowered.describe(names, compiler.platform)))
        on_kernel("libraries")
        return {path.name: path.stat().st_size for path in libraries.values()}

    def _libraries(self, folder: Path, compiler: Compiler) -> dict[str, Path]:
        """The shared libraries; the portable one, which finds out what a machine has, is always among them."""
        source, cache, wanted = self._source, self._options.cache, self._options.cpu_levels
        libraries = (
            {} if wanted is None else compile_levels(source, folder, levels=["portable"], compiler=compiler, cache=cache)
        )
        if wanted is None:
            wanted = compiler.levels
        elif NATIVE in wanted:
            wanted = (*wanted, CPU_LEVELS[ctypes.CDLL(str(libraries["portable"])).llmc_cpu_level()])
        missing = [level for level in wanted if level not in compiler.levels and level != NATIVE]
        if missing:
            raise ToolchainError(
                f"cpu level {missing[0]} cannot be built by {compiler.version} for {compiler.machine}; levels there: "
                f"{', '.join(compiler.levels)}"
            )
        rest = [level for level in compiler.levels if level in wanted and level not in libraries]
        return libraries | compile_levels(source, folder, levels=rest, compiler=compiler, cache=cache)


def _prefill(target: Target, name: str | None) -> QuantizeOptions | None:
    if name is None:
        return None
    if name not in QUANTIZATIONS:
        raise TargetError(f"target {target.name!r}: prefill in {name!r} has no CPU kernels; there are {', '.join(QUANTIZATIONS)}")
    return QUANTIZATIONS[name]


def _kv_options(quantization: QuantizeOptions, options: ProgramOptions) -> KvOptions:
    """One format for each layer or for all; by default bf16, unless everything is f32. Raises `UsageError`."""
    formats = options.kv_layers
    if formats is None:
        default = "f32" if quantization.weights == "f32" else "bf16"
        formats = (options.kv_dtype or default,)
    return KvOptions(formats=formats, rotation=options.kv_rotation)


def row_layout(value: fx.Node, width: int, pack: str) -> RowLayout:
    """Linear inputs in their packed form, everything else in float32."""
    if not pack:
        return RowLayout(format="f32-rows", row_bytes=4 * width)
    format = MatrixFormat.parse(pack)
    return RowLayout(format=pack, row_bytes=operand_row_bytes(format.kind, width, format.group))
