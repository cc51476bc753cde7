"""What a graph pass is: a named, checked rewrite of one `torch.fx.GraphModule`, with its effect counted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from torch import fx


@dataclass(frozen=True, slots=True, kw_only=True)
class PassResult:
    """What a run did. `matches` counts rewrites by kind; `notes` are facts a person tuning the model would want."""

    changed: bool
    matches: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class Pass(ABC):
    """One rewrite.

    `requires` and `ensures` are names of graph properties; a pipeline is refused when a pass runs before what it requires
    has been ensured. `lossy` passes change the numbers on purpose, so verification reports their error but does not fail on it. A
    `required` pass that matches nothing in a pipeline is an error. A pass never prints, times or dumps; instruments around it do.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    requires: ClassVar[frozenset[str]] = frozenset()
    ensures: ClassVar[frozenset[str]] = frozenset()
    lossy: ClassVar[bool] = False
    required: ClassVar[bool] = False

    @abstractmethod
    def run(self, module: fx.GraphModule) -> PassResult:
        """Rewrite `module` in place. Raises `PassError` when the pass was asked for something it cannot do."""
