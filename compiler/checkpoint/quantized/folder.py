"""Finds the quantised weights among the stored tensors of a folder, and what its `quantization_config` promises but does not hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from ....errors import CheckpointError
from .base import QuantizedWeight, StoredQuantization, summarize
from .format import Format
from .module import FLOATS, Module, TensorSource

_KV_SCALES = frozenset({"k_scale", "v_scale", "kv_scale", "k_zero_point", "v_zero_point"})
_ACTIVATION_SCALES = frozenset(
    {"input_scale", "input_zero_point", "output_scale", "output_zero_point", "q_scale", "q_zero_point", "prob_scale"}
)


class NamedSource(TensorSource, Protocol):
    """A source that lists its tensors."""

    def stored_names(self) -> Mapping[str, str]:
        """HF name -> name in the file."""
        ...


class QuantizedFolder:
    """`weights` by parameter name; `consumed` are the names of stored tensors that are parts of them or of no use."""

    def __init__(self, format: Format, source: NamedSource, expected: Mapping[str, tuple[int, ...]]) -> None:
        """`expected` are the architecture's parameters. Raises `CheckpointError` for parts that do not fit each other or
        the config, and for weights that the config promises but that are stored plainly.
        """
        self.format = format
        self.weights: dict[str, QuantizedWeight] = {}
        self.consumed: set[str] = set()
        self._notes: list[str] = []
        names = source.stored_names()
        modules: dict[str, dict[str, str]] = {}
        for name in names:
            module, _, part = name.rpartition(".")
            modules.setdefault(module, {})[part] = name
        for module, parts in sorted(modules.items()):
            stored = names[next(iter(parts.values()))].rpartition(".")[0]
            self._add(Module((module, stored), parts, source), expected)
        self._drop_scales(names)
        self._check_plain(names, source, expected)

    def _add(self, module: Module, expected: Mapping[str, tuple[int, ...]]) -> None:
        weight = self.format.weight(module)
        if weight is None:
            return
        self.weights[f"{module.names[0]}.weight"] = weight
        self.consumed |= {name for part, name in module.parts.items() if part in self.format.parts or part == "weight"}
        bias = f"{module.names[0]}.bias"
        if "bias" in module and f"{module.names[0]}.weight" in expected and bias not in expected:
            module.expect_type("bias", *FLOATS)
            if module.scales("bias").any():
                raise module.damaged("bias", "is not zero, but the architecture has no such bias")
            self.consumed.add(bias)  # old GPTQ writers give every linear a bias of zeros

    def _drop_scales(self, names: Mapping[str, str]) -> None:
        for suffixes, what, instead in (
            (_KV_SCALES, "the KV cache", "the KV cache has the format chosen here"),
            (_ACTIVATION_SCALES, "activations", "activations are quantised as the target does it"),
        ):
            found = {name for name in names if name.rpartition(".")[2] in suffixes}
            self.consumed |= found
            if found:
                self._notes.append(f"{len(found)} stored scales of {what} are not used: {instead}")

    def _check_plain(self, names: Mapping[str, str], source: NamedSource, expected: Mapping[str, tuple[int, ...]]) -> None:
        """A config that says quantised over weights that are not: files like that exist, and would be taken for what they are not."""
        fakes = []
        for name, shape in expected.items():
            module = name.removesuffix(".weight")
            if len(shape) != 2 or not name.startswith("model.layers.") or name in self.weights or name not in names:
                continue
            if source.stored_type(name) in FLOATS and self.format.quantizes((module, names[name].removesuffix(".weight"))):
                fakes.append(name)
        if fakes:
            kinds = ", ".join(sorted({source.stored_type(name) for name in fakes}))
            raise CheckpointError(
                f"{self.format.settings.where} says {self.format.method}, but {len(fakes)} of {len(fakes) + len(self.weights)} matrices "
                f"are stored unquantised as {kinds} (first {fakes[0]}); save the model again in its compressed form, or, if these are "
                "meant to be plain, name them in the config's list of exceptions"
            )

    def summary(self, shapes: Mapping[str, tuple[int, ...]]) -> StoredQuantization:
        """The summary over the parameters that the model uses, given their shapes."""
        used = {name: weight for name, weight in self.weights.items() if name in shapes}
        plain = sum(len(shape) == 2 for name, shape in shapes.items() if name not in used)
        return summarize(self.format.method, used, plain, (*self.format.notes(used), *self._notes))
