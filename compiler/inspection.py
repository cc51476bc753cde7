"""Reads what `llmc inspect` shows, from a bundle's report and programs or from a `--dump-ir` folder; needs no torch."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, TypedDict

import msgspec

from ..errors import BundleError, UsageError
from ..runtime.bundle import read_manifest
from ..runtime.integrity import locate
from ..runtime.manifest import MANIFEST_NAME
from ..runtime.program import CpuProgram, GpuProgram, decode_program
from ..runtime.weights import tensor_bytes

Entry: TypeAlias = "dict[str, Any]"


class PassEntry(TypedDict):
    """One pass of the log that a compile leaves."""

    name: str
    summary: str
    changed: bool
    matches: dict[str, int]
    notes: list[str]
    operators_before: dict[str, int]
    operators_after: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """The passes of a compile for one target with their graphs, and for a bundle the programs and weights of all.

    `weights` maps a tensor type to (count, bytes); `graphs` maps dump names such as `003_fuse-rope` to files; `floors` are the entries of
    the compile report by target.
    """

    where: Path
    facts: dict[str, str]
    passes: list[PassEntry]
    graphs: dict[str, Path]
    programs: dict[str, CpuProgram | GpuProgram] = field(default_factory=dict)
    floors: dict[str, list[Entry]] = field(default_factory=dict)
    weights: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def operators(self) -> Mapping[str, int]:
        """Operator counts after the last pass, over all phases."""
        return self.passes[-1]["operators_after"] if self.passes else {}

    @property
    def memory(self) -> list[str]:
        """What plan-memory noted."""
        return [note for entry in self.passes if entry["name"] == "plan-memory" for note in entry["notes"]]

    def graph(self, name: str) -> str:
        """The graph after pass `name` (`traced` is the graph before the first); after one that changed nothing, the one before it.

        Raises `UsageError` for an unknown name.
        """
        names = ["traced", *(str(entry["name"]) for entry in self.passes)]
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise UsageError(f"no pass is called {name!r}; {hint}passes: {', '.join(names)}")
        last = names.index(name)
        reached = [path for dump, path in sorted(self.graphs.items()) if int(dump[:3]) <= last]
        if not reached:
            raise BundleError(f"{self.where}: holds no graph dumps, expected report/ir/000_traced.txt and later; compile again")
        return reached[-1].read_text(encoding="utf-8")

    def kernel_calls(self) -> dict[str, dict[str, list[Entry]]]:
        """Kernel calls by target and phase."""
        return {
            target: {
                phase.name: [
                    {"kernel": c.kernel, "node": c.node, "inputs": c.inputs, "weights": c.weights, "attributes": c.attributes}
                    for c in phase.calls
                ]
                for phase in program.phases
            }
            for target, program in self.programs.items()
        }

    def kernels(self) -> dict[str, list[Entry]]:
        """For each GPU target, each kernel of each phase: calls, what the binary says, and the least time on the device."""
        tables: dict[str, list[Entry]] = {}
        for target, program in self.programs.items():
            if not isinstance(program, GpuProgram):
                continue
            floors = {(entry["phase"], entry["kernel"]): entry for entry in self.floors.get(target, [])}
            phases = [(phase.name, Counter(call.kernel for call in phase.calls)) for phase in program.phases]
            phases.append(("sampling", Counter([program.sampler.kernel])))
            tables[target] = []
            for phase, counts in phases:
                for name, count in counts.items():
                    kernel, floor = program.kernels[name], floors.get((phase, name), {})
                    tables[target].append(
                        {
                            "phase": phase,
                            "kernel": name,
                            "calls": count,
                            "arch": program.machine,
                            "warps": kernel.num_warps,
                            "shared_bytes": kernel.shared_bytes,
                            "registers": kernel.registers,
                            "spill_bytes": kernel.spill_bytes,
                            "matrix_instructions": kernel.matrix_instructions,
                            **{key: floor.get(key) for key in ("bytes", "operations", "floor_us", "bound")},
                        }
                    )
        return tables

    def as_json(self) -> Entry:
        """Everything but the graphs and kernel calls."""
        return {
            "facts": self.facts,
            "passes": self.passes,
            "operators": dict(self.operators),
            "weights": {name: {"tensors": count, "bytes": size} for name, (count, size) in self.weights.items()},
            "memory": self.memory,
        }


def open_inspection(path: Path, target: str | None = None) -> Inspection:
    """Open a bundle or a dump folder for the passes of `target`, by default the first.

    Raises `BundleError` for a damaged bundle, `UsageError` for anything else and for an unknown target.
    """
    if (path / MANIFEST_NAME).exists():
        return _open_bundle(path, target)
    targets = sorted(folder.parent.name for folder in path.glob("*/passes.json"))
    if targets and not (path / "passes.json").exists():
        path = path / _chosen(targets, target, path)
    if (path / "passes.json").is_file():
        passes = _read_passes(path / "passes.json")
        return Inspection(where=path, facts={}, passes=passes, graphs=_dumps(path))
    raise UsageError(f"{path}: neither a bundle (no {MANIFEST_NAME}) nor a --dump-ir folder (no passes.json)")


def _chosen(targets: list[str], target: str | None, where: Path) -> str:
    if target is not None and target not in targets:
        raise UsageError(f"{where}: no target {target!r}; it holds {', '.join(targets)}")
    return target or targets[0]


def _open_bundle(path: Path, target: str | None) -> Inspection:
    manifest = read_manifest(path)
    chosen = _chosen([entry.name for entry in manifest.targets], target, path)
    programs: dict[str, CpuProgram | GpuProgram] = {}
    weights: dict[str, tuple[int, int]] = {}
    for entry in manifest.targets:
        if entry.program not in manifest.files:
            raise BundleError(
                f"{path}: target {entry.name} names {entry.program}, which the manifest does not list; compile again"
            )
        program_path = locate(path, entry.program, manifest.files[entry.program])
        programs[entry.name] = decode_program(program_path.read_bytes(), str(program_path))
    for spec in programs[chosen].weights:
        count, size = weights.get(spec.dtype, (0, 0))
        weights[spec.dtype] = (count + 1, size + tensor_bytes(spec.dtype, spec.shape))
    model = manifest.model
    facts = {
        "model": f"{model.name} ({model.architecture}, {model.num_parameters / 1e6:.1f} M parameters)",
        "vocabulary": f"{model.vocab_size}, context {model.context_length} tokens",
        "made by": ", ".join(f"{name} {version}" for name, version in sorted(manifest.toolchain.items())),
    }
    for name, program in programs.items():
        scheme, kv = program.scheme, program.kv_cache
        group = f" in groups of {scheme.group_size}" if scheme.group_size else ""
        code = (
            f"levels {', '.join(program.libraries)}"
            if isinstance(program, CpuProgram)
            else f"{len(program.kernels)} kernels for {program.machine}"
        )
        counts = Counter(kv.layer_dtypes)
        dtypes = kv.dtype if len(counts) == 1 else " + ".join(f"{dtype} x {count}" for dtype, count in counts.items())
        slot = f" and {kv.bytes_per_slot} B/sequence in 16 bit" if kv.bytes_per_slot else ""
        facts[f"target {name}"] = (
            f"weights {scheme.weights}{group}, head {scheme.head}, KV {dtypes} ({kv.bytes_per_token} B/token{slot}), "
            f"arena {program.arena_bytes} B, {code}"
        )
    for entry in manifest.targets:
        if len(entry.weights) > 1:
            facts[f"weights of {entry.name}"] = ", ".join(entry.weights)
    reports = _read_report(path / "report" / "compile.json")
    return Inspection(
        where=path,
        facts=facts,
        passes=reports[chosen].passes if chosen in reports else [],
        graphs=_dumps(path / "report" / "ir" / chosen),
        programs=programs,
        floors={name: report.floors for name, report in reports.items()},
        weights=weights,
    )


def _dumps(folder: Path) -> dict[str, Path]:
    return {path.stem: path for path in folder.glob("[0-9][0-9][0-9]_*.txt")}


class _TargetReport(msgspec.Struct):
    passes: list[PassEntry]
    floors: list[Entry] = []


class _Report(msgspec.Struct):
    targets: dict[str, _TargetReport]


def _read_report(path: Path) -> dict[str, _TargetReport]:
    """What `report/compile.json` says of each target; empty where there is no report."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Report).targets if path.is_file() else {}
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BundleError(f"{path}: not a compile report ({error}); compile again") from None


def _read_passes(path: Path) -> list[PassEntry]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[PassEntry])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BundleError(f"{path}: not a pass log ({error}); compile again") from None
