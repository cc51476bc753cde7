"""A CPU program: the lowered phases, the weights they take, the generated C++ and the description the runtime reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import jinja2
from torch import fx

from ...passes.dialect import llmc
from ...passes.graph import calls
from ...passes.graph import phases as phases_of
from ...passes.plan_memory import MemoryPlan
from ...runtime.program import ABI_VERSION, MAX_THREADS, CpuProgram, KvCacheSpec, Phase, Scheme
from ..backend import ModelShape
from .kv_layout import KvLayout
from .lower import KernelCall, WeightList, lower_phase
from .weight_layout import StoredWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweredCpu:
    """Everything that is built for one CPU target but the libraries."""

    model: str
    target: str
    scheme: Scheme
    vocab_size: int
    context_length: int
    max_tokens: int
    arena_bytes: int
    kv_cache: KvCacheSpec
    phases: dict[str, list[KernelCall]]
    weights: list[StoredWeight]

    def source(self) -> str:
        """The generated program.cpp."""
        environment = jinja2.Environment(
            loader=jinja2.PackageLoader("llmc.codegen.cpu"),
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
            undefined=jinja2.StrictUndefined,
            autoescape=False,  # C++, not HTML
        )
        return environment.get_template("program.cpp.j2").render(
            model=" ".join(self.model.split()).replace("\\", "/"),
            target=self.target,
            vocab_size=self.vocab_size,
            phases=[{"name": name, "calls": calls} for name, calls in self.phases.items()],
        )

    def describe(self, libraries: dict[str, str], machine: str) -> CpuProgram:
        """program.json; `libraries` maps levels to file names, `machine` is what they are built for."""
        return CpuProgram(
            abi_version=ABI_VERSION,
            target=self.target,
            backend="cpu",
            machine=machine,
            scheme=self.scheme,
            vocab_size=self.vocab_size,
            max_tokens=self.max_tokens,
            arena_bytes=self.arena_bytes,
            context_length=self.context_length,
            kv_cache=self.kv_cache,
            weights=[spec for weight in self.weights for spec in weight.specs()],
            libraries=libraries,
            phases=[
                Phase(
                    name=name,
                    max_tokens=self.max_tokens,
                    single_token=name == "decode",
                    calls=[call.describe() for call in calls],
                )
                for name, calls in self.phases.items()
            ],
        )


def lower(module: fx.GraphModule, *, model: ModelShape, target: str, scheme: Scheme, max_tokens: int) -> LoweredCpu:
    """Lower a module that went through the CPU pipeline."""
    plans = cast("dict[str, MemoryPlan]", module.meta["memory"])
    kv = KvLayout.of(module)
    num_heads = max(cast(int, node.args[12]) for node in calls(module, llmc.rope_paged_attention.default))
    weights = WeightList()
    workspace_offset = max(plan.arena_bytes for plan in plans.values())
    kernels = {
        name: lower_phase(graph, plans[name], weights, kv=kv, workspace_offset=workspace_offset)
        for name, graph in reversed(phases_of(module).items())  # the most special first
    }
    workspace_bytes = kv.workspace_bytes(max_tokens=max_tokens, num_heads=num_heads, threads=MAX_THREADS)
    return LoweredCpu(
        model=model.name,
        target=target,
        scheme=scheme,
        vocab_size=model.vocab_size,
        context_length=model.context_length,
        max_tokens=max_tokens,
        arena_bytes=workspace_offset + workspace_bytes,
        kv_cache=kv.spec(),
        phases=kernels,
        weights=weights.stored,
    )
