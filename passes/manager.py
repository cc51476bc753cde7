"""Runs a pipeline and tells instruments about it; timing, dumping and verifying live there, never in a pass."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import fx

from ..errors import PassError, UsageError
from .base import Pass, PassResult
from .graph import operator_counts


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRecord:
    """One line of the pass log; `seconds` is wall time and is left out of anything that must be reproducible."""

    name: str
    summary: str
    changed: bool
    matches: dict[str, int]
    notes: tuple[str, ...]
    operators_before: dict[str, int]
    operators_after: dict[str, int]
    seconds: float


class Instrument(Protocol):
    """Watches passes. `before` may be called without `after` when a pass fails."""

    def before(self, step: Pass, module: fx.GraphModule) -> None:
        """Called with the graph the pass is about to see."""

    def after(self, step: Pass, module: fx.GraphModule, record: PassRecord) -> None:
        """Called with the graph the pass left behind."""


class PassManager:
    """A checked list of passes.

    Raises `PassError` on construction where a pass requires what none before it ensures.
    """

    def __init__(self, passes: Sequence[Pass], instruments: Sequence[Instrument] = ()) -> None:
        self.passes = tuple(passes)
        self.instruments = tuple(instruments)
        ensured: set[str] = set()
        for step in self.passes:
            missing = step.requires - ensured
            if missing:
                raise PassError(
                    f"pipeline: {step.name} requires {', '.join(sorted(missing))}, which no pass before it ensures; move it later"
                )
            ensured |= step.ensures

    def run(self, module: fx.GraphModule, stop_after: str | None = None) -> list[PassRecord]:
        """Run the passes in order on `module`; with `stop_after`, the pass of that name is the last."""
        names = [step.name for step in self.passes]
        if stop_after is not None and stop_after not in names:
            raise UsageError(f"no pass is called {stop_after!r}; choose one of {', '.join(names)}")
        records: list[PassRecord] = []
        for step in self.passes:
            records.append(self._run_one(step, module))
            if step.name == stop_after:
                break
        return records

    def _run_one(self, step: Pass, module: fx.GraphModule) -> PassRecord:
        for instrument in self.instruments:
            instrument.before(step, module)
        before = operator_counts(module)
        start = time.perf_counter()
        result: PassResult = step.run(module)
        seconds = time.perf_counter() - start
        if step.required and not any(result.matches.values()):
            raise PassError(
                f"{step.name}: found nothing to fuse ({step.summary}), expected at least one match; the operators are "
                f"{', '.join(before)}; file an issue with the model's config"
            )
        record = PassRecord(
            name=step.name,
            summary=step.summary,
            changed=result.changed,
            matches=dict(result.matches),
            notes=result.notes,
            operators_before=_sorted(before),
            operators_after=_sorted(operator_counts(module)),
            seconds=seconds,
        )
        for instrument in self.instruments:
            instrument.after(step, module, record)
        return record


def _sorted(counts: Counter[str]) -> dict[str, int]:
    return dict(sorted(counts.items()))
