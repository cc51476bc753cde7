"""Checks that the figures of a program.json agree with each other, and that no launch reaches outside of what it names."""

from __future__ import annotations

from collections import Counter

from ..errors import BundleError
from .program import (
    BLOCK_SIZE,
    CPU_LEVELS,
    KV_DTYPES,
    KV_SLOT_BLOCKS,
    Argument,
    Call,
    CpuProgram,
    Extent,
    GpuProgram,
    KvCacheSpec,
    ParameterEntry,
    Program,
    kv_head_bytes,
)

INPUTS = ("token_ids", "positions", "query_start", "context_len", "block_table", "logit_rows")
SYMBOLS = ("T", "R", "B", "max_blocks")
INTEGERS = {"i32": (-(2**31), 2**31), "u32": (0, 2**32), "i64": (-(2**63), 2**63), "u64": (0, 2**64)}
FLOAT = "fp32"  # the one type of numbers that are not whole
ELEMENTS = ("bf16", "fp16", "fp32", "fp64", "fp8e4nv", "fp8e4b8", "i8", "u8", "i16", "u16", "i32", "u32", "i64", "u64")
_LARGEST_FLOAT = 3.4e38
_OF_SAMPLER = ("sampling", "sampled")


def check_program(program: CpuProgram | GpuProgram, where: str) -> None:
    """Everything that the types of the schema do not say; `where` begins each message. Raises BundleError."""
    _check_kv(program.kv_cache, where, has_slots=isinstance(program, CpuProgram))
    _check_phases(program, where)
    counts = Counter(weight.name for weight in program.weights)
    twice = [name for name, count in counts.items() if count > 1]
    if twice:
        raise BundleError(f"{where}: weight {twice[0]!r} is listed more than once")
    if isinstance(program, CpuProgram):
        _check_libraries(program, where)
    else:
        _check_launches(program, where)


def _check_libraries(program: CpuProgram, where: str) -> None:
    unknown = sorted(set(program.libraries) - set(CPU_LEVELS))
    if unknown:
        raise BundleError(f"{where}: unknown library levels {unknown}; expected {', '.join(CPU_LEVELS)}")
    if "portable" not in program.libraries:
        raise BundleError(f"{where}: no 'portable' library; found {sorted(program.libraries)}")


def _check_kv(kv: KvCacheSpec, where: str, *, has_slots: bool) -> None:
    if kv.block_size != BLOCK_SIZE:
        raise BundleError(f"{where}: kv_cache.block_size is {kv.block_size}, expected {BLOCK_SIZE}")
    if len(kv.layer_dtypes) != kv.num_layers:
        raise BundleError(
            f"{where}: kv_cache.layer_dtypes lists {len(kv.layer_dtypes)} layers, but kv_cache.num_layers is {kv.num_layers}"
        )
    unknown = [dtype for dtype in kv.layer_dtypes if dtype not in KV_DTYPES]
    if unknown:
        raise BundleError(f"{where}: kv_cache.layer_dtypes holds {unknown[0][:40]!r}, expected of each {', '.join(KV_DTYPES)}")
    tokens = 2 * kv.num_kv_heads * BLOCK_SIZE  # keys and values of one layer of a block
    least = tokens * sum(kv_head_bytes(dtype, kv.head_dim) for dtype in kv.layer_dtypes)
    if kv.bytes_per_block < least:
        raise BundleError(
            f"{where}: kv_cache.bytes_per_block is {kv.bytes_per_block}, but 2 * {kv.num_kv_heads} heads * {BLOCK_SIZE} tokens "
            f"of {kv.num_layers} {kv.dtype} layers take {least}"
        )
    num_packed = sum(dtype not in ("f32", "bf16") for dtype in kv.layer_dtypes) if has_slots else 0
    slot = num_packed * KV_SLOT_BLOCKS * tokens * kv_head_bytes("bf16", kv.head_dim)
    if kv.bytes_per_slot != slot:
        raise BundleError(
            f"{where}: kv_cache.bytes_per_slot is {kv.bytes_per_slot}, but {num_packed} layers with slots of {KV_SLOT_BLOCKS} "
            f"blocks in bf16 take {slot}"
        )
    if kv.bytes_per_block % 64:
        raise BundleError(f"{where}: kv_cache.bytes_per_block is {kv.bytes_per_block}, expected a multiple of 64")


def _check_phases(program: Program, where: str) -> None:
    last = program.phases[-1]
    if last.name != "prefill" or last.single_token or last.max_tokens != program.max_tokens:
        raise BundleError(
            f"{where}: the last phase is {last.name!r} for {'single tokens, ' if last.single_token else ''}at most "
            f"{last.max_tokens}, expected 'prefill' for any {program.max_tokens} tokens"
        )
    longest = max(program.phases, key=lambda phase: phase.max_tokens)
    if longest.max_tokens > program.max_tokens:
        raise BundleError(
            f"{where}: phase {longest.name!r} is for {longest.max_tokens} tokens, but max_tokens is {program.max_tokens}"
        )


def _check_launches(program: GpuProgram, where: str) -> None:
    """Refuse a launch that names what is not there, has the wrong arguments or leaves the arena."""
    for name, kernel in program.kernels.items():
        for parameter in kernel.parameters:
            if not (parameter.type in (*INTEGERS, FLOAT) or (parameter.type[:1] == "*" and parameter.type[1:] in ELEMENTS)):
                raise BundleError(f"{where}: parameter {parameter.name} of {name} has the unknown type {parameter.type[:40]!r}")
    for phase in program.phases:
        for call in phase.calls:
            _check_call(call, program, where, of_sampler=False)
    _check_call(program.sampler, program, where, of_sampler=True)


def _check_call(call: Call, program: GpuProgram, where: str, *, of_sampler: bool) -> None:
    kernel = program.kernels.get(call.kernel)
    if kernel is None:
        raise BundleError(f"{where}: {call.node} calls kernel {call.kernel[:100]!r}, which is not among the kernels")
    if len(call.grid) != 3 or len(call.arguments) != len(kernel.parameters):
        raise BundleError(
            f"{where}: {call.node} launches {call.kernel} over {len(call.grid)} axes with {len(call.arguments)} arguments, "
            f"expected 3 and {len(kernel.parameters)}"
        )
    if of_sampler and not all(_depends_on_rows_alone(axis) for axis in call.grid):
        raise BundleError(f"{where}: {call.node} is the sampler, but its grid depends on more than R")
    for argument, parameter in zip(call.arguments, kernel.parameters, strict=True):
        if not _is_valid(argument, parameter, program, of_sampler=of_sampler):
            raise BundleError(
                f"{where}: {call.node} passes [{argument.kind!r}, {argument.value!r}] for {parameter.name} "
                f"({parameter.type}) of {call.kernel}; compile the bundle again"
            )


def _depends_on_rows_alone(axis: Extent) -> bool:
    return axis.symbol in ("", "R") and not axis.add_sequences


def _is_valid(argument: Argument, parameter: ParameterEntry, program: GpuProgram, *, of_sampler: bool) -> bool:
    kind, value = argument.kind, argument.value
    if parameter.type == FLOAT:
        return kind == "constant" and isinstance(value, int | float) and abs(value) <= _LARGEST_FLOAT
    if kind in ("symbol", "constant"):
        bounds = INTEGERS.get(parameter.type)
        if bounds is None:
            return False
        if kind == "symbol":
            return value == "R" if of_sampler else value in SYMBOLS
        return isinstance(value, int) and bounds[0] <= value < bounds[1]
    if not parameter.type.startswith("*") or (kind in _OF_SAMPLER and not of_sampler):
        return False
    if kind == "input":
        return value in INPUTS and not of_sampler
    if not isinstance(value, int):
        return False
    if kind == "arena":
        return 0 <= value < max(program.arena_bytes, 1)
    if kind == "weight":
        return 0 <= value < len(program.weights)
    return value == 0
