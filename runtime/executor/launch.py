"""Turns the calls of a GPU program into launches: a kernel, a grid and the value of every argument."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..program import Argument, Call, Extent, Program
from .base import SAMPLING_DTYPE, StepBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Addresses on the device of everything that an argument can point to."""

    vocab_size: int
    weights: Sequence[int] = ()
    arena: int = 0
    kv_pool: int = 0
    logits: int = 0
    sampling: int = 0
    sampled: int = 0
    inputs: Mapping[str, int] = field(default_factory=dict)

    def at_row(self, row: int) -> Memory:
        """The same, but with logits, sampling records and sampled ids from row `row` on."""
        return replace(
            self,
            logits=self.logits + 4 * self.vocab_size * row,
            sampling=self.sampling + SAMPLING_DTYPE.itemsize * row,
            sampled=self.sampled + 4 * row,
        )


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch; `values` are addresses for pointers and plain numbers for the rest."""

    kernel: str
    grid: tuple[int, int, int]
    values: tuple[int | float, ...]


def symbols_of(batch: StepBatch) -> dict[str, int]:
    """The symbols of a step: T tokens, R rows of logits, B sequences, and the width of the block table."""
    return {
        "T": len(batch.token_ids),
        "R": len(batch.logit_rows),
        "B": len(batch.context_len),
        "max_blocks": batch.block_table.shape[1],
    }


def plan_step(program: Program, batch: StepBatch, memory: Memory) -> list[Launch]:
    """The launches of one step, in the phase that the program has for such a batch."""
    symbols = symbols_of(batch)
    phase = program.phases[program.phase_for(symbols["T"], single_token=symbols["T"] == symbols["B"])]
    return plan(phase.calls, memory, symbols)


def plan(calls: Sequence[Call], memory: Memory, symbols: Mapping[str, int]) -> list[Launch]:
    """The launches of `calls`, in order, without those whose grid is empty."""
    launches = []
    for call in calls:
        x, y, z = (extent(axis, symbols) for axis in call.grid)
        if x and y and z:
            values = tuple(_value(argument, memory, symbols) for argument in call.arguments)
            launches.append(Launch(call.kernel, (x, y, z), values))
    return launches


def extent(axis: Extent, symbols: Mapping[str, int]) -> int:
    """Programs along one axis."""
    count = symbols[axis.symbol] if axis.symbol else 1
    return axis.factor * (-(-count // axis.divisor) + (symbols["B"] if axis.add_sequences else 0))


def _value(argument: Argument, memory: Memory, symbols: Mapping[str, int]) -> int | float:
    value = argument.value
    if argument.kind == "constant" and not isinstance(value, str):
        return value
    if isinstance(value, str):
        return symbols[value] if argument.kind == "symbol" else memory.inputs[value]
    assert isinstance(value, int), f"program.json was not checked: argument {argument}"
    match argument.kind:
        case "arena":
            return memory.arena + value
        case "weight":
            return memory.weights[value]
        case "kv_pool":
            return memory.kv_pool
        case "logits":
            return memory.logits
        case "sampling":
            return memory.sampling
        case "sampled":
            return memory.sampled
    raise AssertionError(f"program.json was not checked: argument {argument}")
