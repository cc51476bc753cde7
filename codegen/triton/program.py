"""A GPU program: the lowered phases, their kernels built for one architecture, and the description the runtime launches from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from torch import fx

from ...errors import TargetError
from ...passes.graph import phases as phases_of
from ...passes.insert_kv_cache import KvCacheShape
from ...passes.plan_memory import MemoryPlan
from ...runtime.program import (
    ABI_VERSION,
    Argument,
    GpuProgram,
    KernelEntry,
    KvCacheSpec,
    ParameterEntry,
    Phase,
    Scheme,
    encode_program,
)
from ...targets import Device, Target, list_targets
from ..backend import ModelShape
from . import attention, sampling
from .build import WARP_SIZE, Architecture, BuiltKernel, build
from .calls import GpuCall, WeightList, Work, Workspace
from .kernel import Kernel
from .lower import Lowering, PhaseShape, lower_phase
from .tiles import DeviceFacts
from .weight_layout import GpuWeight

_USABLE = 0.92  # of a device's memory: the driver and the CUDA context take the rest
_LEAST_CONTEXT = 4096  # tokens of KV cache without which a model is not worth loading


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweredGpu:
    """A `LoweredProgram`."""

    target: Target
    scheme: Scheme
    model: ModelShape
    max_tokens: int
    arena_bytes: int
    kv_cache: KvCacheSpec
    phases: dict[PhaseShape, list[GpuCall]]
    sampler: GpuCall
    workspace: Workspace
    weights: list[GpuWeight]
    cache: Path

    def num_calls(self) -> dict[str, int]:
        """Kernel calls of each phase."""
        return {phase.name: len(calls) for phase, calls in self.phases.items()}

    def kernels(self) -> dict[str, Kernel]:
        """Every kernel by name. Two different ones of one name are a mistake of this package."""
        found: dict[str, Kernel] = {}
        for call in self._all_calls():
            kernel = found.setdefault(call.kernel.name, call.kernel)
            if kernel != call.kernel:
                raise AssertionError(f"two different kernels are called {kernel.name}")
        return found

    def floors(self) -> list[dict[str, object]]:
        """For each kernel of each phase, one call's bytes, operations and least time by the device's data sheet.

        The reference batches are a full step of each phase: one prompt of `max_tokens`, or `max_tokens` sequences with a context of
        `REFERENCE_CONTEXT` tokens each.
        """
        entries: list[dict[str, object]] = []
        for phase, calls in [*((phase.name, calls) for phase, calls in self.phases.items()), ("sampling", [self.sampler])]:
            counts = Counter(call.kernel.name for call in calls)
            for call in {call.kernel.name: call for call in calls}.values():
                floor = _floor(call.work, self.target.device)
                entries.append({"phase": phase, "kernel": call.kernel.name, "calls": counts[call.kernel.name], **floor})
        return entries

    def build(self, folder: Path, on_kernel: Callable[[str], object]) -> dict[str, int]:
        """Write program.json, and source and binary of each kernel. Raises `ToolchainError`."""
        device = self.target.device
        assert device.shared_memory_per_block_bytes is not None
        architecture = Architecture(
            name=device.arch,
            backend=device.backend,
            shared_memory_per_block_bytes=device.shared_memory_per_block_bytes,
        )
        kernels = self.kernels()
        built = build(kernels.values(), architecture, cache=self.cache, on_done=on_kernel)
        (folder / "kernels" / device.arch).mkdir(parents=True)
        entries: dict[str, KernelEntry] = {}
        for name, kernel in kernels.items():
            source, binary = f"kernels/{name}.py", f"kernels/{device.arch}/{name}.{architecture.suffix}"
            (folder / source).write_text(kernel.source(), encoding="utf-8")
            (folder / binary).write_bytes(built[name].binary)
            entries[name] = _entry(kernel, built[name], source, binary)
        (folder / "program.json").write_bytes(encode_program(self._describe(entries)))
        return {entry.binary: (folder / entry.binary).stat().st_size for entry in entries.values()}

    def _all_calls(self) -> list[GpuCall]:
        return [*(call for calls in self.phases.values() for call in calls), self.sampler]

    def _describe(self, kernels: dict[str, KernelEntry]) -> GpuProgram:
        return GpuProgram(
            abi_version=ABI_VERSION,
            target=self.target.name,
            backend=self.target.backend,
            machine=self.target.device.arch,
            scheme=self.scheme,
            vocab_size=self.model.vocab_size,
            max_tokens=self.max_tokens,
            arena_bytes=self.arena_bytes,
            context_length=self.model.context_length,
            kv_cache=self.kv_cache,
            weights=[spec for weight in self.weights for spec in weight.specs()],
            warp_size=WARP_SIZE[self.target.backend],
            kernels=kernels,
            sampler=self.sampler.describe(self.workspace),
            phases=[
                Phase(
                    name=phase.name,
                    max_tokens=phase.max_tokens,
                    single_token=phase.single_token,
                    calls=[call.describe(self.workspace) for call in calls],
                )
                for phase, calls in self.phases.items()
            ],
        )


def lower(
    module: fx.GraphModule,
    *,
    target: Target,
    scheme: Scheme,
    model: ModelShape,
    phases: tuple[PhaseShape, ...],
    fp8_type: Literal["fp8e4nv", "fp8e4b8"],
    cache: Path,
) -> LoweredGpu:
    """Lower a module that went through the GPU pipeline; `phases` are listed most special first, prefill last.

    Raises `TargetError` for a model that does not fit the device's memory.
    """
    plans = cast("dict[str, MemoryPlan]", module.meta["memory"])
    graphs = phases_of(module)
    shape = cast(KvCacheShape, module.meta["kv_cache"])
    kv_format = cast(Literal["bf16", "fp8", "int8"], scheme.kv)
    weights, workspace = WeightList(), Workspace()
    offsets = {"prefill": 0, "decode": plans["prefill"].arena_bytes}
    lowered = {
        phase: lower_phase(
            Lowering(
                module=graphs[phase.owner],
                phase=phase,
                plan=plans[phase.owner],
                plan_offset=offsets[phase.owner],
                device=device_facts(target.device),
                fp8_type=fp8_type,
                kv_format=kv_format,
                weights=weights,
                workspace=workspace,
            )
        )
        for phase in phases
    }
    layer_bytes = attention.layer_bytes(shape.num_kv_heads, shape.head_dim, kv_format)
    program = LoweredGpu(
        target=target,
        scheme=scheme,
        model=model,
        max_tokens=phases[-1].max_tokens,
        arena_bytes=workspace.place(sum(plan.arena_bytes for plan in plans.values())),
        kv_cache=KvCacheSpec(
            layer_dtypes=[scheme.kv] * shape.num_layers,
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            block_size=shape.block_size,
            bytes_per_block=shape.num_layers * layer_bytes,
        ),
        phases=lowered,
        sampler=_sampler(model.vocab_size, phases[0].max_tokens),
        workspace=workspace,
        weights=weights.stored,
        cache=cache,
    )
    _check_memory(program)
    return program


def device_facts(device: Device) -> DeviceFacts:
    """What tiles are chosen by. Raises `TargetError` for a device file that lacks a fact."""
    wanted = ("num_processors", "shared_memory_per_block_bytes", "memory_bandwidth_bytes_per_s")
    missing = [name for name in wanted if getattr(device, name) is None]
    if missing:
        raise TargetError(f"device {device.name!r}: its file gives no {missing[0]}; add it: tiles are chosen by it")
    return DeviceFacts(
        arch=device.arch,
        num_processors=cast(int, device.num_processors),
        shared_memory_per_block_bytes=cast(int, device.shared_memory_per_block_bytes),
        memory_bandwidth_bytes_per_s=cast(float, device.memory_bandwidth_bytes_per_s),
    )


def _sampler(vocab_size: int, rows: int) -> GpuCall:
    kernel = sampling.sample_kernel(vocab_size)
    records = Argument("sampling", 0)
    return GpuCall(
        kernel=kernel,
        node="token_ids",
        inputs=("logits", "sampling"),
        weights=(),
        arguments={
            "logits": Argument("logits", 0),
            **dict.fromkeys(("settings_f32", "settings_i32", "settings_i64"), records),
            "token_ids": Argument("sampled", 0),
            "num_rows": Argument("symbol", "R"),
        },
        work=Work(bytes=4 * rows * vocab_size),
    )


def _floor(work: Work, device: Device) -> dict[str, object]:
    floor: dict[str, object] = {"bytes": work.bytes, "operations": work.operations}
    bandwidth, rate = device.memory_bandwidth_bytes_per_s, device.peak_ops_per_s.get(work.dtype)
    if bandwidth is None or (rate is None and work.operations):
        return floor | {"floor_us": None, "bound": None}
    memory, compute = 1e6 * work.bytes / bandwidth, 1e6 * work.operations / rate if rate else 0.0
    return floor | {"floor_us": round(max(memory, compute), 3), "bound": "memory" if memory >= compute else "compute"}


def _entry(kernel: Kernel, built: BuiltKernel, source: str, binary: str) -> KernelEntry:
    return KernelEntry(
        source=source,
        binary=binary,
        parameters=[ParameterEntry(parameter.name, parameter.type) for parameter in kernel.parameters],
        num_warps=built.num_warps,
        shared_bytes=built.shared_bytes,
        registers=built.registers,
        spill_bytes=built.spill_bytes,
        matrix_instructions=built.matrix_instructions,
    )


def _check_memory(program: LoweredGpu) -> None:
    device = program.target.device
    if device.memory_bytes is None:
        return
    context = min(program.model.context_length, _LEAST_CONTEXT)
    kv = -(-context // program.kv_cache.block_size) * program.kv_cache.bytes_per_block
    weights = sum(weight.num_bytes() for weight in program.weights)
    usable = int(device.memory_bytes * _USABLE)
    needed = weights + program.arena_bytes + kv
    if needed <= usable:
        return
    larger = sorted({t.device.name for t in list_targets() if (t.device.memory_bytes or 0) * _USABLE >= needed})
    narrower = [scheme for scheme in ("fp8", "int8", "int4") if scheme in device.schemes and scheme != program.target.scheme]
    fixes = [f"{what} ({', '.join(names)})" for what, names in (("a narrower scheme", narrower), ("a larger device", larger)) if names]
    sizes = f"{weights / 1e9:.1f} GB for weights, {program.arena_bytes / 1e9:.1f} GB for activations and {kv / 1e9:.1f} GB for"
    raise TargetError(
        f"target {program.target.name!r}: {program.model.name} needs {sizes} {context} tokens of KV cache, but {device.name} has "
        f"{usable / 1e9:.1f} GB to use; choose {' or '.join(fixes) or 'a smaller model'}"
    )
