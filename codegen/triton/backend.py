"""The GPU code generator: number formats, passes, and lowering to Triton kernels built ahead of time."""

from __future__ import annotations

import importlib.util
from importlib.metadata import version
from typing import Literal

from torch import fx

from ...errors import MissingExtraError, TargetError, UsageError
from ...formats.floats import Array
from ...formats.grid import GROUP_SIZES, Grid
from ...passes.base import Pass
from ...passes.pipelines import gpu_pipeline
from ...passes.quantize import QuantizeOptions
from ...runtime.program import Scheme
from ...targets import Target
from ..backend import ModelShape, ProgramOptions
from .formats import decode_matrix
from .lower import PhaseShape, is_packed, row_layout
from .program import LoweredGpu, device_facts, lower

DEFAULT_MAX_TOKENS = 4096
DECODE_SEQUENCES = (1, 4, 16, 64, 256)
"""The most sequences of each decode phase. Products have tiles of 16, 64 or more rows; attention has splits to fill the device."""

_HEAD = "bf16"  # errors in the head reach the logits undamped
_WEIGHTS = {
    "bf16": "bf16",
    "fp8": "fp8",
    "int8": "w8a8",
    "int4": "w4a16-g128",
    **{f"int4-g{g}": f"w4a16-g{g}" for g in GROUP_SIZES},
}
QUANTIZATIONS = tuple(_WEIGHTS)


class GpuBackend:
    """A `Backend`."""

    def __init__(self, target: Target, options: ProgramOptions) -> None:
        """Raises `TargetError` and `UsageError` for options that the device cannot serve."""
        device = target.device
        name = options.quantization or target.scheme
        if name not in _WEIGHTS:
            raise TargetError(f"target {target.name!r}: {name!r} has no GPU kernels; there are {', '.join(QUANTIZATIONS)}")
        kv_dtypes = ("bf16", "fp8", "int8") if target.supports("fp8") else ("bf16", "int8")
        if options.kv_dtype not in (None, *kv_dtypes):
            raise UsageError(
                f"target {target.name!r}: KV dtype {options.kv_dtype!r} is not to be had on {device.name}; choose {', '.join(kv_dtypes)}"
            )
        if options.kv_layers is not None or options.kv_rotation:
            raise UsageError(
                f"target {target.name!r}: GPU programs keep all layers in one KV dtype, unrotated; leave KV layers and rotation out"
            )
        if options.cpu_levels is not None:
            raise UsageError(f"target {target.name!r} has no CPU levels; leave --cpu-levels out, or add a cpu target")
        device_facts(device)  # raises where a fact is missing
        self.target = target
        self.fnuz = target.supports("fp8-fnuz")
        weights = "fp8-fnuz" if name == "fp8" and self.fnuz else _WEIGHTS[name]
        self.quantization = QuantizeOptions(weights=weights, head=_HEAD, overrides=options.formats)
        self.prefill = self._prefill(options.prefill_quantization)
        self.kv_dtype = options.kv_dtype or "bf16"
        self.max_tokens = options.max_tokens or DEFAULT_MAX_TOKENS
        self.options = options

    def _prefill(self, name: str | None) -> QuantizeOptions | None:
        if name is None:
            return None
        if name not in _WEIGHTS:
            raise TargetError(
                f"target {self.target.name!r}: prefill in {name!r} has no GPU kernels; there are {', '.join(QUANTIZATIONS)}"
            )
        return QuantizeOptions(weights="fp8-fnuz" if name == "fp8" and self.fnuz else _WEIGHTS[name], head=_HEAD)

    @property
    def candidates(self) -> tuple[str, ...]:
        """What the device multiplies: packed int4, its 8-bit formats, and bf16."""
        eight = ("fp8-fnuz" if self.fnuz else "fp8",) if self.target.supports("fp8") else ("w8a8",)
        return ("w4a16-g64", "w4a16-g128", *eight, "bf16")

    def format_for(self, stored: str) -> str | None:
        """fp8 where the device has that variant, and symmetric int4."""
        if stored == "fp8":
            return "fp8" if self.target.supports("fp8") and not self.fnuz else None
        grid = Grid.parse(stored)
        return f"w4a16-g{grid.group}" if grid is not None and grid.bits == 4 and grid.symmetric else None

    @property
    def kv_candidates(self) -> tuple[str, ...]:
        """One: the layers of a GPU program share a dtype."""
        return (self.kv_dtype,)

    @property
    def phases(self) -> tuple[PhaseShape, ...]:
        """The decode phases, by the most sequences they take, and prefill."""
        decode = [min(sequences, self.max_tokens) for sequences in DECODE_SEQUENCES]
        return (
            *(PhaseShape(name=f"decode-{n}", max_tokens=n, single_token=True) for n in dict.fromkeys(decode)),
            PhaseShape(name="prefill", max_tokens=self.max_tokens, single_token=False),
        )

    def check(self) -> dict[str, str]:
        """Find Triton. Raises `MissingExtraError`."""
        if importlib.util.find_spec("triton") is None:
            raise MissingExtraError(
                f"target {self.target.name!r} needs the package 'triton', which is not installed; run: pip install 'llmc[compile]', "
                "or choose a cpu target"
            )
        return {"triton": version("triton")}

    def notes(self) -> list[str]:
        """Nothing."""
        return []

    def pipeline(self) -> tuple[Pass, ...]:
        """The passes."""
        decode = max(phase.max_tokens for phase in self.phases if phase.single_token)
        return gpu_pipeline(
            quantization=self.quantization,
            prefill=self.prefill,
            max_tokens={"prefill": self.max_tokens, "decode": decode},
            storage=row_layout,
            is_packed=is_packed,
        )

    def decode_matrix(self, value: Array, format: str) -> Array:
        """A float32 matrix as it comes back after being stored in `format`."""
        return decode_matrix(value, format)

    def lower(self, module: fx.GraphModule, model: ModelShape) -> LoweredGpu:
        """The program in Triton kernels. Raises `TargetError` where it does not fit the device's memory."""
        group = self.quantization.weights.partition("-g")[2]
        fp8_type: Literal["fp8e4nv", "fp8e4b8"] = "fp8e4b8" if self.fnuz else "fp8e4nv"
        return lower(
            module,
            target=self.target,
            scheme=Scheme(
                weights=self.quantization.weights.removesuffix(f"-g{group}"),
                head=self.quantization.head,
                group_size=int(group) if group else None,
                kv=self.kv_dtype,
            ),
            model=model,
            phases=self.phases,
            fp8_type=fp8_type,
            cache=self.options.cache,
        )
