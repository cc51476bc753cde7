"""Reads what `llmc inspect` shows, from a bundle's report and programs or from a `--dump-ir` folder; needs no torch."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, TypedDict

import msgspec

from ..errors import BundleError, UsageError
from ..runtime.bundle import read_manifest
from ..runtime.integrity import locate
from ..runtime.manifest import MANIFEST_NAME
from ..runtime.program import Program, decode_program
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
    """The passes of a compile with their graphs, and for a bundle its programs and weights.

    `weights` maps a tensor type to (count, bytes); `graphs` maps dump names such as `003_fuse-rope` to files.
    """

    where: Path
    facts: dict[str, str]
    passes: list[PassEntry]
    graphs: dict[str, Path]
    programs: dict[str, Program] = field(default_factory=dict)
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

    def as_json(self) -> Entry:
        """Everything but the graphs and kernel calls."""
        return {
            "facts": self.facts,
            "passes": self.passes,
            "operators": dict(self.operators),
            "weights": {name: {"tensors": count, "bytes": size} for name, (count, size) in self.weights.items()},
            "memory": self.memory,
        }


def open_inspection(path: Path) -> Inspection:
    """Open a bundle or a dump folder. Raises `BundleError` for a damaged bundle, `UsageError` for anything else."""
    if (path / MANIFEST_NAME).exists():
        return _open_bundle(path)
    if (path / "passes.json").is_file():
        return Inspection(where=path, facts={}, passes=_read_passes(path / "passes.json"), graphs=_dumps(path))
    raise UsageError(f"{path}: neither a bundle (no {MANIFEST_NAME}) nor a --dump-ir folder (no passes.json)")


def _open_bundle(path: Path) -> Inspection:
    manifest = read_manifest(path)
    programs: dict[str, Program] = {}
    weights: dict[str, tuple[int, int]] = {}
    for entry in manifest.targets:
        if entry.program not in manifest.files:
            raise BundleError(
                f"{path}: target {entry.name} names {entry.program}, which the manifest does not list; compile again"
            )
        program_path = locate(path, entry.program, manifest.files[entry.program])
        programs[entry.name] = decode_program(program_path.read_bytes(), str(program_path))
        for spec in programs[entry.name].weights:
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
        facts[f"target {name}"] = (
            f"weights {scheme.weights}{group}, head {scheme.head}, KV {scheme.kv} "
            f"({kv.bytes_per_block // kv.block_size} B/token), arena {program.arena_bytes} B, levels {', '.join(program.libraries)}"
        )
    report = path / "report" / "compile.json"
    passes = _read_passes(report) if report.is_file() else []
    return Inspection(
        where=path, facts=facts, passes=passes, graphs=_dumps(path / "report" / "ir"), programs=programs, weights=weights
    )


def _dumps(folder: Path) -> dict[str, Path]:
    return {path.stem: path for path in folder.glob("[0-9][0-9][0-9]_*.txt")}


def _read_passes(path: Path) -> list[PassEntry]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        passes = value["passes"] if isinstance(value, dict) else value
        return msgspec.convert(passes, type=list[PassEntry])
    except (OSError, ValueError, KeyError, TypeError, msgspec.ValidationError) as error:
        raise BundleError(f"{path}: not a pass log ({type(error).__name__}); compile again") from None
