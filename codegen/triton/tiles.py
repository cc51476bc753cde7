"""Chooses the tiles of linear kernels: a rule from a device's facts, and tables of what the rule gives for known devices.

The rule is a model, not a measurement. It lists candidate tiles, leaves out those that would not fit (limits seen in builds for each
architecture) and takes the one with the least modelled time. `benchmarks/tune.py` writes its choices to `tuning/<device>.toml`,
where one measured on the device may take its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from itertools import product
from typing import Any, Literal, TypeAlias

import msgspec

from ...errors import TargetError
from .linear import Backend, LinearProblem, Tile

Phase: TypeAlias = Literal["prefill", "decode"]

ROWS: dict[Phase, tuple[int, ...]] = {"decode": (16, 32, 64), "prefill": (128, 512, 4096)}
"""The numbers of rows that tables have tiles for; a kernel for at most so many rows takes the next higher one, or the last."""
N_CLASSES = (2048, 4096, 6144, 8192, 14336, 28672, 131072)
K_CLASSES = (4096, 14336)
"""Sizes that tables have tiles for, in the same way."""

_LATENCY = 0.9e-6  # seconds from a load to its data while the memory is busy
_PROCESSOR_RATE = 64e9  # bytes a second that one processor takes in
_CACHE_RATE = 45e9  # bytes a second that the L2 cache gives each processor when all ask
_START = 1.5e-6  # seconds until the first program multiplies
_JOIN = 2.0e-6  # seconds that adding up split columns takes: a store, a counter and loads that wait for each other
_STEP = 0.15e-6  # seconds that a step costs beside its data: waits and barriers
_TILE_OVERHEAD = 128 * 128 * 384  # start and end of a prefill tile, in multiplications
_OPERAND_COST = 12  # multiplications as costly as bringing one operand value to the matrix units
_STATIC_SHARED = 1024  # bytes of shared memory that the system keeps for each program


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """What the rule asks of a device."""

    arch: str
    num_processors: int
    shared_memory_per_block_bytes: int
    memory_bandwidth_bytes_per_s: float


def choose_tile(problem: LinearProblem, phase: Phase, max_rows: int, device: DeviceFacts) -> Tile:
    """The tile of a kernel for at most `max_rows` rows: from the device's table, that of the most alike device of its architecture,
    or by the rule.

    Raises `TargetError` where no tile fits.
    """
    tables = [table for table in load_tables().values() if table.facts.arch == device.arch]
    if not tables:
        return compute_tile(problem, phase, _class(max_rows, ROWS[phase]), device)
    alike = min(tables, key=lambda table: _distance(table.facts, device))
    return alike.find(problem, phase, max_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A tile for outputs up to `n` and columns up to `k`; the last entries of a section serve anything larger."""

    n: int
    k: int
    tile: Tile


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The tiles of one device, by section name (`section_name`)."""

    facts: DeviceFacts
    sections: dict[str, tuple[Entry, ...]]

    def find(self, problem: LinearProblem, phase: Phase, max_rows: int) -> Tile:
        """The tile of the problem's size class."""
        name = section_name(problem, phase, _class(max_rows, ROWS[phase]))
        if name not in self.sections:
            raise TargetError(f"linear: no tiles [{name}] for {self.facts.arch}; its table has {', '.join(self.sections)}")
        n, k = _class(problem.n, N_CLASSES), _class(problem.k, K_CLASSES)
        return next(entry.tile for entry in self.sections[name] if n <= entry.n and k <= entry.k)


def section_name(problem: LinearProblem, phase: Phase, rows: int) -> str:
    """The section of a table, such as `decode.int4g128_glu.rows_16`."""
    scheme = f"int4g{problem.group}" if problem.group else problem.format
    return f"{phase}.{scheme}{'_glu' if problem.activation else ''}.rows_{rows}"


@cache
def load_tables() -> dict[str, Table]:
    """The tables that come with llmc, by device name."""
    folder = resources.files(__package__) / "tuning"
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".toml")), key=lambda file: file.name)
    return {file.name.removesuffix(".toml"): parse_table(file.read_text(encoding="utf-8")) for file in files}


def parse_table(text: str) -> Table:
    """A table from the text of its TOML file."""
    data: dict[str, Any] = msgspec.toml.decode(text)
    facts = DeviceFacts(**data.pop("device"))
    sections: dict[str, tuple[Entry, ...]] = {}
    for phase, schemes in data.items():
        for scheme, by_rows in schemes.items():
            for rows, lines in by_rows.items():
                sections[f"{phase}.{scheme}.{rows}"] = tuple(
                    Entry(n=line.pop("n"), k=line.pop("k"), tile=Tile(**line)) for line in map(dict, lines)
                )
    return Table(facts=facts, sections=sections)


def compute_table(facts: DeviceFacts) -> Table:
    """What the rule gives for every section, with neighbouring classes that share a tile in one entry."""
    sections: dict[str, tuple[Entry, ...]] = {}
    for problem in representatives(facts):
        for phase, rows_classes in ROWS.items():
            for rows in rows_classes:
                entries: list[Entry] = []
                for k in K_CLASSES:
                    line: list[Entry] = []
                    for n in N_CLASSES:
                        tile = compute_tile(replace(problem, n=n, k=k), phase, rows, facts)
                        if line and line[-1].tile == tile:
                            line.pop()
                        line.append(Entry(n=n, k=k, tile=tile))
                    before = entries[-len(line) :]
                    if [(entry.n, entry.tile) for entry in before] == [(entry.n, entry.tile) for entry in line]:
                        entries = entries[: -len(line)]
                    entries += line
                sections[section_name(problem, phase, rows)] = tuple(entries)
    return Table(facts=facts, sections=sections)


def representatives(facts: DeviceFacts) -> list[LinearProblem]:
    """One problem of each kind that a table tells apart and the device has."""
    rocm = facts.arch.startswith("gfx")
    kinds: list[dict[str, Any]] = [{"format": "bf16"}, {"format": "int8"}]
    if facts.arch != "sm_80":
        kinds.append({"format": "fp8", "fp8_type": "fp8e4b8" if rocm else "fp8e4nv"})
    kinds += [{"format": "int4", "group": group} for group in (32, 64, 128)]
    backend: Backend = "rocm" if rocm else "cuda"
    return [
        LinearProblem(n=4096, k=4096, activation=activation, backend=backend, **kind)
        for kind, activation in product(kinds, (None, "silu"))
    ]


def compute_tile(problem: LinearProblem, phase: Phase, rows: int, device: DeviceFacts) -> Tile:
    """The rule: of the candidates that fit, the one with the least modelled time for `rows` rows."""
    candidates = _decode_candidates(problem, rows, device) if phase == "decode" else _prefill_candidates(problem, rows, device)
    model = _decode_seconds if phase == "decode" else _prefill_cost
    fitting = [
        tile for tile in candidates if _shared_bytes(problem, tile, phase, device) <= device.shared_memory_per_block_bytes
    ]
    if not fitting:
        raise TargetError(
            f"linear: no {phase} tile for {problem.scheme} fits {device.shared_memory_per_block_bytes} bytes of shared memory"
        )
    return min(fitting, key=lambda tile: (model(problem, tile, rows, device), tile.split_k, tile.num_stages))


def _decode_candidates(problem: LinearProblem, rows: int, device: DeviceFacts) -> Iterator[Tile]:
    """Tiles of up to 512 bytes of each weight row a step, with few enough sums for a thread's registers."""
    rocm = device.arch.startswith("gfx")
    sums = 2 if problem.activation else 1
    block_m = min(_power_of_two(rows), 32 if problem.group and sums == 2 else 64)
    unroll = _unroll(problem, device)
    if problem.group is None:
        columns = [row_bytes * 8 // _weight_bits(problem) // unroll for row_bytes in (256, 512)]
    else:
        # More groups a step need more registers, and on sm_100 more tensor memory, than there are.
        most = 2 * problem.group if device.arch == "sm_100" or rocm or block_m > 16 else 128 if sums == 2 else 256
        columns = sorted({2 * problem.group, *(size for size in (128, 256) if 2 * problem.group <= size <= most)})
    heights = (32, 64, 128) if problem.group is None else (64,) if rocm else (64, 128)
    for block_n, block_k, stages, split in product(heights, columns, (2,) if rocm else (3, 4, 6), (1, 2, 3, 4, 6, 8)):
        num_warps = 8 if block_n == 128 or (problem.group and block_m > 16 and not rocm) else 4
        if sums * block_n * block_m > 64 * 32 * num_warps // (2 if problem.group else 1) or sums * block_n > 128:
            continue
        programs = -(-rows // block_m) * -(-problem.n // block_n)
        steps = -(-problem.k // (block_k * unroll))
        if split > 1 and (programs >= 2 * device.num_processors or (split - 1) * -(-steps // split) >= steps):
            continue  # there are enough programs, or the last one of a tile would have nothing to do
        yield Tile(
            block_m=block_m,
            block_n=block_n,
            block_k=block_k,
            num_warps=num_warps,
            num_stages=stages,
            split_k=split,
            unroll=unroll,
        )


def _prefill_candidates(problem: LinearProblem, rows: int, device: DeviceFacts) -> Iterator[Tile]:
    """Tiles whose sums fill half the registers of a thread at most."""
    old, rocm = device.arch in ("sm_80", "sm_89"), device.arch.startswith("gfx")
    sums = 2 if problem.activation else 1
    stages = (2,) if rocm else (3, 4)
    if problem.group is not None:
        # Each product of a group needs registers for its sums before they are scaled, beside the converted weights.
        for block_m, block_n, num_stages in product((16, 32, 64), (64,) if rocm else (64, 128), (2,) if rocm else (2, 3)):
            if block_n * sums > 128 or (block_m == 64 and old and problem.group > 32 and sums == 2):
                continue
            block_k = max(2 * problem.group, 64 if sums == 2 or rocm or device.arch == "sm_100" else 128)
            num_warps = 4 if rocm else 8  # AMD's threads have 512 registers with 4 warps, 256 with 8
            yield Tile(block_m=block_m, block_n=block_n, block_k=block_k, num_warps=num_warps, num_stages=num_stages)
        return
    unroll = _unroll(problem, device)
    step = (32 if old and unroll == 1 else 64) * (16 // _weight_bits(problem)) // unroll
    for (block_m, width, num_warps), num_stages in product(
        ((128, 256, 8), (128, 128, 8), (64, 256, 8), (64, 128, 4), (64, 64, 4), (256, 128, 8), (256, 256, 8)), stages
    ):
        if block_m == 256 and not rocm:
            continue
        if width == 256 and block_m == 256:
            step = min(step, 32 * (16 // _weight_bits(problem)))
        if block_m > max(64, _power_of_two(rows)):
            continue
        yield Tile(
            block_m=block_m, block_n=width // sums, block_k=step, num_warps=num_warps, num_stages=num_stages, unroll=unroll
        )


def _unroll(problem: LinearProblem, device: DeviceFacts) -> int:
    """See `Tile.unroll`."""
    carried = device.arch in ("sm_80", "sm_89") and problem.format in ("fp8", "int8") and problem.activation is None
    return 2 if carried else 1


def _decode_seconds(problem: LinearProblem, tile: Tile, rows: int, device: DeviceFacts) -> float:
    """Weights at the speed of the memory, if enough bytes are under way and processors and cache keep up."""
    weight_bytes, x_bytes = _step_bytes(problem, tile, used_rows=min(rows, tile.block_m))
    steps = -(-problem.k // (tile.block_k * tile.unroll * tile.split_k))
    tiles = -(-rows // tile.block_m) * -(-problem.n // tile.block_n)
    programs = tiles * tile.split_k
    slots = device.num_processors * _residents(problem, tile, "decode", device)
    step_bytes = weight_bytes + x_bytes
    seconds = 0.0
    for wave in [slots] * (programs // slots) + [programs % slots]:
        if wave:
            under_way = wave * (tile.num_stages - 1) * step_bytes / _LATENCY
            limits = (
                under_way,
                wave * step_bytes / _STEP,
                min(wave, device.num_processors) * _PROCESSOR_RATE,
                device.num_processors * max(_CACHE_RATE, 1.5 * device.memory_bandwidth_bytes_per_s / device.num_processors),
                device.memory_bandwidth_bytes_per_s * step_bytes / weight_bytes,
            )
            rate = (
                sum(limit**-4 for limit in limits) ** -0.25
            )  # a smooth minimum: twice as much as needed is better than just enough
            seconds += wave * steps * step_bytes / rate
    if tile.split_k > 1:
        partial_bytes = 2 * 4 * programs * tile.block_m * tile.block_n * (2 if problem.activation else 1)
        seconds += _JOIN + partial_bytes / (device.num_processors * _CACHE_RATE)
    return _START + seconds


def _prefill_cost(problem: LinearProblem, tile: Tile, rows: int, device: DeviceFacts) -> float:
    """Multiplications of the busiest processor, and what tiles add to them."""
    width = tile.block_n * (2 if problem.activation else 1)
    operands = _OPERAND_COST * (tile.block_m + width)
    residents = _residents(problem, tile, "prefill", device)
    waiting = 1.0 if residents > 1 else 1.0 + 0.1 / (tile.num_stages - 1)  # for data, with no other program to step in
    work = (tile.block_m * width + operands) * problem.k * waiting
    tiles = -(-rows // tile.block_m) * -(-problem.n // tile.block_n)
    per_processor = -(-tiles // device.num_processors)
    return per_processor * work + -(-per_processor // residents) * _TILE_OVERHEAD


def _residents(problem: LinearProblem, tile: Tile, phase: Phase, device: DeviceFacts) -> int:
    """Programs that one processor holds at a time."""
    total = device.shared_memory_per_block_bytes + (0 if device.arch.startswith("gfx") else _STATIC_SHARED)
    shared = _shared_bytes(problem, tile, phase, device) + _STATIC_SHARED
    sums = tile.block_m * tile.block_n * (2 if problem.activation else 1) // (32 * tile.num_warps)
    registers = 64 + (sums * 3 // 2 if problem.group is None else 3 * sums + 64)
    return max(1, min(total // shared, 65536 // (32 * tile.num_warps * registers), 64 // tile.num_warps))


def _shared_bytes(problem: LinearProblem, tile: Tile, phase: Phase, device: DeviceFacts) -> int:
    """Shared memory of a kernel: its stages, or the tile on its way out."""
    weight_bytes, x_bytes = _step_bytes(problem, tile, used_rows=tile.block_m)
    rows_of_product = tile.block_n if phase == "decode" or problem.group else tile.block_m
    direct = device.arch in ("sm_90", "sm_100") and rows_of_product >= 64  # operands that matrix units read from shared memory
    stages = tile.num_stages if direct else tile.num_stages - 1
    out = tile.block_m * min(tile.block_n, 64) * 4
    return max(stages * (weight_bytes + x_bytes), out)


def _step_bytes(problem: LinearProblem, tile: Tile, *, used_rows: int) -> tuple[int, int]:
    """Bytes of the weight and of x in one step."""
    columns = tile.block_k * tile.unroll
    sums = 2 if problem.activation else 1
    x_bits = 16 if problem.format in ("bf16", "int4") else 8
    return sums * tile.block_n * columns * _weight_bits(problem) // 8, used_rows * columns * x_bits // 8


def _weight_bits(problem: LinearProblem) -> int:
    return {"bf16": 16, "fp8": 8, "int8": 8, "int4": 4}[problem.format]


def _class(size: int, classes: tuple[int, ...]) -> int:
    """The first class that is not smaller, or the last."""
    return next((bound for bound in classes if size <= bound), classes[-1])


def _distance(one: DeviceFacts, other: DeviceFacts) -> float:
    """How unlike two devices of an architecture are, 0 for equal facts."""
    bandwidth = one.memory_bandwidth_bytes_per_s / other.memory_bandwidth_bytes_per_s
    return abs(1 - one.num_processors / other.num_processors) + abs(1 - bandwidth)


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
