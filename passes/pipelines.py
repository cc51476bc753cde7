"""The order of the passes: one literal list for each backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import fx

from .base import Pass
from .canonicalise import Canonicalise
from .fuse_add_norm import FuseAddNorm
from .fuse_gate_up import FuseGateUp
from .fuse_glu import FuseGlu
from .fuse_qkv import FuseQkv
from .fuse_residual import FuseResidual
from .fuse_rms_norm import FuseRmsNorm
from .fuse_rope import FuseRope
from .fuse_rope_append import FuseRopeAppend
from .graph import copy_module
from .insert_kv_cache import InsertKvCache
from .pack_operands import PackOperands
from .plan_memory import PlanMemory, Storage
from .quantize import Quantize, QuantizeOptions
from .quantize_kv import KvOptions, QuantizeKv
from .specialise_prefill import SpecialisePrefill
from .split_phases import SplitPhases


def calibration_pipeline() -> tuple[Pass, ...]:
    """The first passes of every pipeline: from a traced graph to one of whole sequences with the fused weights of all that follow."""
    return (
        # the traced aten graph, tidied
        Canonicalise(),
        # aten subgraphs to dialect operators
        FuseRmsNorm(),
        FuseRope(),
        FuseGlu(),
        # dialect operators to larger ones
        FuseQkv(),
        FuseGateUp(),
        FuseAddNorm(),
    )


def calibration_graph(traced: fx.GraphModule) -> fx.GraphModule:
    """What `calibration_pipeline` makes of a copy of a traced module, to measure what passes through it."""
    module = copy_module(traced)
    for step in calibration_pipeline():
        step.run(module)
    return module


def cpu_pipeline(
    *,
    quantization: QuantizeOptions,
    prefill: QuantizeOptions | None,
    kv: KvOptions,
    max_tokens: Mapping[str, int],
    storage: Storage,
) -> tuple[Pass, ...]:
    """Passes from a traced graph to one that maps kernel for kernel to a CPU program."""
    return (
        *calibration_pipeline(),
        # the step contract
        InsertKvCache(),
        FuseRopeAppend(),
        # numbers
        Quantize(quantization),
        QuantizeKv(kv),
        # execution
        SplitPhases(),
        SpecialisePrefill(prefill),
        PackOperands(),
        PlanMemory(max_tokens, storage),
    )


def gpu_pipeline(
    *,
    quantization: QuantizeOptions,
    prefill: QuantizeOptions | None,
    max_tokens: Mapping[str, int],
    storage: Storage,
    is_packed: Callable[[fx.Node, str], bool],
) -> tuple[Pass, ...]:
    """Passes from a traced graph to one that maps kernel for kernel to a GPU program."""
    return (
        *calibration_pipeline(),
        FuseResidual(),
        # the step contract
        InsertKvCache(),
        FuseRopeAppend(),
        # numbers
        Quantize(quantization),
        # execution
        SplitPhases(),
        SpecialisePrefill(prefill),
        PackOperands(is_packed),
        PlanMemory(max_tokens, storage),
    )
