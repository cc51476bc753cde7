"""A CPU program: the lowered phases, the weights they take, the generated C++ and the description the runtime reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import jinja2
from torch import fx

from ...passes.dialect import llmc
from ...passes.graph import calls
from ...passes.graph import phases as phases_of
from ...passes.insert_kv_cache import KvCacheShape
from ...passes.plan_memory import MemoryPlan
from ...runtime.program import ABI_VERSION, KV_ITEM_BYTES, MAX_THREADS, CpuProgram, KvCacheSpec, Phase, Scheme
from ..backend import ModelShape
from . import packing
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
    cache = cast(KvCacheShape, module.meta["kv_cache"])
    weights = WeightList()
    workspace_offset = max(plan.arena_bytes for plan in plans.values())
    kernels = {
        name: lower_phase(graph, plans[name], weights, kv_dtype=scheme.kv, workspace_offset=workspace_offset)
        for name, graph in reversed(phases_of(module).items())  # the most special first
    }
    block_values = cache.num_layers * 2 * cache.num_kv_heads * cache.head_dim * cache.block_size
    return LoweredCpu(
        model=model.name,
        target=target,
        scheme=scheme,
        vocab_size=model.vocab_size,
        context_length=model.context_length,
        max_tokens=max_tokens,
        arena_bytes=workspace_offset + _workspace_bytes(module, cache, max_tokens, model.context_length),
        kv_cache=KvCacheSpec(
            dtype=scheme.kv,
            num_layers=cache.num_layers,
            num_kv_heads=cache.num_kv_heads,
            head_dim=cache.head_dim,
            block_size=cache.block_size,
            bytes_per_block=block_values * KV_ITEM_BYTES[scheme.kv],
        ),
        phases=kernels,
        weights=weights.stored,
    )


def _workspace_bytes(module: fx.GraphModule, cache: KvCacheShape, max_tokens: int, context_length: int) -> int:
    num_heads = max(cast(int, node.args[12]) for node in calls(module, llmc.rope_paged_attention.default))
    return packing.attention_workspace_bytes(
        max_tokens, num_heads, cache.num_kv_heads, cache.head_dim, context_length, MAX_THREADS
    )
