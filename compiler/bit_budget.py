"""Chooses formats for one back end: for every matrix, and for every layer's KV cache, by what each costs alone."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import cast

import torch
from torch import fx

from ..codegen import Backend
from ..errors import QualityError, UsageError
from ..passes.graph import shape
from ..quantization.allocate import Allocation, Choice, allocate
from ..quantization.kv_sensitivity import KvLayer, attention_nodes, measure_kv
from ..quantization.sensitivity import Sensitivity, measure_sensitivities
from ..runtime.program import kv_head_bytes
from .calibrated_model import CalibratedModel
from .options import AUTO
from .progress import Progress

_MARGIN = 0.9  # of --max-kl that is aimed at: the gate measures other positions than the sensitivities
_ROWS, _LENGTH = 256, 256  # positions that each effect is measured on, and the length of the texts
_KV_TOKENS = 4096  # of the sequence whose KV cache counts as memory
_KV_LENGTH = 2048  # of the texts that its formats are tried on: the longer the context, the more a packed cache matters
_KV_KL = 0.01  # what the KV cache may add where no limit is given
_KV_PART = "kv."  # and a layer's number: the name of its cache among the parts of an allocation


class BitBudget:
    """The measured costs of one back end's formats, and allocations under the limits of `model.options`."""

    def __init__(self, model: CalibratedModel, backend: Backend, progress: Progress, *, chooses_kv: bool) -> None:
        """Raises UsageError where KV dtypes shall be chosen, but layers cannot differ."""
        self.model = model
        self.backend = backend
        self.progress = progress
        self.chooses_kv = chooses_kv
        if chooses_kv and len(backend.kv_candidates) == 1:
            raise UsageError(
                f"target {backend.target.name!r}: --kv-dtype {AUTO} chooses for each layer, but all layers of a GPU program share one; "
                "name a dtype"
            )

    @property
    def is_limited(self) -> bool:
        """Whether formats are chosen at all."""
        return self.model.options.max_kl is not None or self.model.options.memory_budget is not None

    def allocate(self, factor: float) -> Allocation:
        """Formats within the limits; `factor` corrects the expected divergence of matrices by what an earlier one turned out to have.

        Raises QualityError with the nearest figures where the smallest formats are over the budget.
        """
        options = self.model.options
        choices: dict[str, list[Choice]] = {name: s.choices(factor) for name, s in self.sensitivities.items()}
        if self.chooses_kv:
            choices |= self._kv_choices()
        max_bytes = None if options.memory_budget is None else options.memory_budget - self.fixed_bytes
        max_kl = None if options.max_kl is None else options.max_kl * _MARGIN
        found = allocate(choices, max_bytes=max_bytes, max_kl=max_kl)
        if max_bytes is not None and found.num_bytes > max_bytes:
            raise QualityError(
                f"--memory-budget {options.memory_budget}: the smallest this model gets is {found.num_bytes + self.fixed_bytes} bytes, "
                f"with an expected mean KL of {found.kl:.3g}; allow that many"
            )
        return found

    def matrix_formats(self, allocation: Allocation) -> dict[str, str]:
        """The formats of matrices, by graph name."""
        return {name: format for name, format in allocation.formats().items() if not name.startswith(_KV_PART)}

    def kv_layers(self, allocation: Allocation | None) -> tuple[str, ...] | None:
        """A KV dtype for each layer: as allocated with the weights, else the fewest bytes that add little; None where none is chosen."""
        if not self.chooses_kv:
            return None
        found = allocation or allocate(self._kv_choices(), max_kl=_KV_KL)
        return tuple(found.choices[f"{_KV_PART}{kv.layer}"].format for kv in self.kv_costs)

    @cached_property
    def sensitivities(self) -> Mapping[str, Sensitivity]:
        """Of every matrix."""
        model = self.model
        self.progress.stage("sensitivities")
        return measure_sensitivities(
            model.module,
            model.steps,
            model.probe.thinned(_ROWS, _LENGTH),
            self.backend.candidates,
            model.read,
            lambda value, format: torch.from_numpy(self.backend.decode_matrix(value.numpy(), format)),
            self.progress.done,
        )

    @cached_property
    def kv_costs(self) -> list[KvLayer]:
        """Of every layer's cache."""
        model = self.model
        self.progress.stage("KV sensitivities")
        probe = model.long_probe(_KV_LENGTH, _ROWS)
        return measure_kv(model.module, model.steps, probe, self.backend.kv_candidates, model.read)

    @property
    def fixed_bytes(self) -> int:
        """Vectors, which stay in float32, and, unless it is chosen with the weights, the KV cache of one sequence."""
        vectors = sum(4 * weight.num_elements for weight in self.model.table.values() if len(weight.shape) == 1)
        return vectors if self.chooses_kv else vectors + self._kv_bytes()

    def _kv_bytes(self) -> int:
        """The KV cache of one sequence in the back end's default dtype."""
        keys = [shape(cast(fx.Node, node.args[1])) for _, node in attention_nodes(self.model.steps)]  # [1, Hkv, T, D]
        dtype = self.backend.kv_candidates[-1]
        return sum(2 * heads * self._context * kv_head_bytes(dtype, dim) for _, heads, _, dim in keys)

    def _kv_choices(self) -> dict[str, list[Choice]]:
        return {f"{_KV_PART}{kv.layer}": kv.choices(self._context) for kv in self.kv_costs}

    @property
    def _context(self) -> int:
        """Tokens of the sequence whose KV cache counts."""
        return min(_KV_TOKENS, int(self.model.checkpoint.config.max_position_embeddings))
