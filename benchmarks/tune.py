"""Writes the tile tables of linear kernels by the rule in codegen/triton/tiles.py, and builds what they name.

    python benchmarks/tune.py --device h100 [--device ...]      write codegen/triton/tuning/<device>.toml
    python benchmarks/tune.py --device h100 --check             build the kernels of the committed table; no GPU is needed

A check builds a kernel of a real size for every tile of a table, with everything fused that needs registers, and fails for one
that spills, needs more shared memory than a block has, or has no matrix instructions.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from llmc.codegen.triton.build import Architecture, build
from llmc.codegen.triton.kernel import Kernel
from llmc.codegen.triton.linear import LinearProblem, Tile, decode_kernel, prefill_kernel
from llmc.codegen.triton.program import device_facts
from llmc.codegen.triton.tiles import Table, compute_table, load_tables, representatives, section_name
from llmc.errors import ToolchainError
from llmc.targets.target import list_targets

FOLDER = Path(__file__).parent.parent / "codegen" / "triton" / "tuning"
_HEADER = """\
# Tiles of linear kernels for {name}, by the rule in codegen/triton/tiles.py: the least modelled time. Not measured on the device.
# Written by `python benchmarks/tune.py --device {name}`. A section serves up to so many rows of x; its first entry whose n
# (outputs) and k (columns) are not smaller than the problem's applies, or the last ones for larger sizes.
"""


def main() -> None:
    devices = {target.device.name: target.device for target in list_targets() if target.device.backend != "cpu"}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", action="append", choices=sorted(devices), help="default: all")
    parser.add_argument("--check", action="store_true", help="build instead of writing")
    parser.add_argument("--cache", type=Path, default=Path("build/tune"), help="where built kernels are kept")
    parser.add_argument("--jobs", type=int, help="compilers at a time (default: the CPUs)")
    arguments = parser.parse_args()
    failed = 0
    for name in arguments.device or sorted(devices):
        if arguments.check:
            failed += check(name, load_tables()[name], arguments.cache, arguments.jobs)
        else:
            FOLDER.mkdir(exist_ok=True)
            path = FOLDER / f"{name}.toml"
            path.write_text(render(name, compute_table(device_facts(devices[name]))), encoding="utf-8")
            print(f"wrote {path}")
    sys.exit(1 if failed else 0)


def render(name: str, table: Table) -> str:
    """The text of a table's TOML file."""
    lines = [_HEADER.format(name=name), "[device]"]
    for fact, value in asdict(table.facts).items():
        lines.append(f'{fact} = "{value}"' if isinstance(value, str) else f"{fact} = {value}")
    for section, entries in table.sections.items():
        phase, scheme, rows = section.split(".")
        lines += ["", f"[{phase}.{scheme}]"] if not any(line == f"[{phase}.{scheme}]" for line in lines) else []
        lines.append(f"{rows} = [")
        for entry in entries:
            fields = {"n": entry.n, "k": entry.k, **_settings(entry.tile)}
            lines.append("  { " + ", ".join(f"{key} = {value}" for key, value in fields.items()) + " },")
        lines.append("]")
    return "\n".join(lines) + "\n"


def _settings(tile: Tile) -> dict[str, int]:
    """The fields of a tile that are not at their defaults."""
    return {
        field: value
        for field, value in asdict(tile).items()
        if value != {"split_k": 1, "group_m": 8, "persistent": 0, "unroll": 1}.get(field)
    }


def check(name: str, table: Table, cache: Path, jobs: int | None = None) -> int:
    """Build the kernels of a table; returns how many fail."""
    arch = table.facts.arch
    limits = Architecture(
        name=arch,
        backend="cuda" if arch.startswith("sm_") else "rocm",
        shared_memory_per_block_bytes=table.facts.shared_memory_per_block_bytes,
    )
    failed = most_registers = most_shared = 0
    kernels = list(kernels_of(table))
    with contextlib.suppress(ToolchainError):  # fills the cache with one compiler process a CPU; failures are named below
        build(kernels, limits, cache=cache, jobs=jobs)
    for kernel in kernels:
        try:
            built = build([kernel], limits, cache=cache, jobs=1)[kernel.name]
        except ToolchainError as error:
            failed += 1
            print(f"{name}: {error}", flush=True)
            continue
        if not built.matrix_instructions:
            failed += 1
            print(f"{name}: kernel {kernel.name} has no matrix instructions", flush=True)
        most_registers, most_shared = max(most_registers, built.registers), max(most_shared, built.shared_bytes)
    print(
        f"{name} ({arch}): {len(kernels)} kernels, {failed} failed; up to {most_registers} registers, {most_shared} bytes of shared "
        f"memory of {limits.shared_memory_per_block_bytes}",
        flush=True,
    )
    return failed


def kernels_of(table: Table) -> Iterator[Kernel]:
    """Each tile of a table once, for the largest size that it serves: with a bias, and a residual or the widest activation."""
    for problem in representatives(table.facts):
        fused: LinearProblem = (
            replace(problem, bias=True, activation="gelu", output="bf16")
            if problem.activation
            else replace(problem, bias=True, residual=True, output="f32")
        )
        for section, entries in table.sections.items():
            phase = section.split(".")[0]
            rows = int(section.rpartition("_")[2])
            if section != section_name(problem, "decode" if phase == "decode" else "prefill", rows):
                continue
            for tile, entry in {entry.tile: entry for entry in entries}.items():
                make = decode_kernel if phase == "decode" else prefill_kernel
                yield make(replace(fused, n=min(entry.n, 28672), k=min(entry.k, 14336)), tile)


if __name__ == "__main__":
    main()
