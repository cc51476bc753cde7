"""The `quantization_config` of a compressed-tensors checkpoint: which modules are on which grid, and what is left alone.

Only keys that the format's loaders know are written: they refuse others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

from ...errors import UsageError
from ...formats.grid import Grid
from .base import EMBEDDING, LM_HEAD, ExportModel

Activations = Literal["16-bit", "int8", "fp8"]
Kind = Literal["packed", "int8", "fp8"]

_FORMATS: Final[dict[Kind, str]] = {"packed": "pack-quantized", "int8": "int-quantized", "fp8": "float-quantized"}
_SIBLINGS: Final = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # fused by runtimes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleScheme:
    """How the weight of a linear module is stored: `packed` codes of `grid`, `int8` codes, or `fp8`, which have a scale a row.

    With `static`, one stored scale is that of its inputs.
    """

    kind: Kind
    grid: Grid | None = None
    static: bool = False


def choose_schemes(model: ExportModel, activations: Activations) -> tuple[dict[str, ModuleScheme], list[str]]:
    """The scheme of each quantised weight, by name, and remarks. Raises `UsageError` for what the format or its kernels cannot hold."""
    schemes: dict[str, ModuleScheme] = {}
    remarks: list[str] = []
    for name in sorted(model.tensor_names()):
        grid, shape = model.grid(name), model.shape(name)
        if name in (EMBEDDING, LM_HEAD):
            if grid is not None:
                remarks.append(
                    f"{name} is stored in 16 bits, not on {grid}: runtimes read no quantised embedding or head in this format"
                )
            continue
        if len(shape) != 2:
            continue
        if activations == "fp8":
            if grid is not None:
                raise UsageError(f"export: {name} is on {grid}; fp8 weights are made from an unquantised model")
            schemes[name] = ModuleScheme(kind="fp8", static=model.input_step(name) is not None)
        elif grid is not None:
            scheme = _scheme(name, shape, grid, activations)
            schemes[name] = replace(scheme, static=model.input_step(name) is not None)
    if not schemes:
        raise UsageError("export: no matrix is quantised; choose --quantization int8, int4-g32/64/128, w8a8 or fp8")
    return schemes, remarks + _mixed_siblings(schemes)


def quantization_config(schemes: Mapping[str, ModuleScheme], model: ExportModel, activations: Activations) -> dict[str, object]:
    """The object for config.json."""
    members: dict[ModuleScheme, list[str]] = defaultdict(list)
    for name, scheme in schemes.items():
        members[scheme].append(name.removesuffix(".weight"))
    plain = [
        name.removesuffix(".weight")
        for name in sorted(model.tensor_names() - set(schemes))
        if len(model.shape(name)) == 2 and name not in (EMBEDDING, LM_HEAD)
    ]
    groups: dict[str, object] = {}
    for index, (scheme, modules) in enumerate(members.items()):
        groups[f"group_{index}"] = {
            "targets": ["Linear"] if len(members) == 1 else modules,
            "weights": _weights(scheme),
            "input_activations": _activations(activations, static=scheme.static),
            "output_activations": None,
            "format": _FORMATS[scheme.kind],
        }
    formats = {_FORMATS[scheme.kind] for scheme in members}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": ["lm_head", *plain],
        "config_groups": groups,
    }


def _scheme(name: str, shape: tuple[int, ...], grid: Grid, activations: Activations) -> ModuleScheme:
    if activations == "int8":
        if str(grid) != "int8":
            raise UsageError(f"export: {name} is on {grid}; int8 activations need int8 weights with a scale a row")
        return ModuleScheme(kind="int8", grid=grid)
    if grid.bits not in (4, 8):
        raise UsageError(
            f"export: {name} is on {grid}; compressed-tensors runtimes have kernels for 4 and 8 bits alone: "
            "quantise to int4 or int8, or export as GGUF"
        )
    if grid.group is not None and shape[1] % grid.group:
        raise UsageError(
            f"export: {name} has in_features={shape[1]}, not divisible by group size {grid.group}; "
            "use a smaller group, or export as GGUF"
        )
    return ModuleScheme(kind="packed", grid=grid)


def _weights(scheme: ModuleScheme) -> dict[str, object]:
    grid = scheme.grid
    group = grid.group if grid is not None else None
    return {
        "num_bits": 8 if grid is None else grid.bits,
        "type": "float" if scheme.kind == "fp8" else "int",
        "symmetric": grid is None or grid.symmetric,
        "strategy": "channel" if group is None else "group",
        "group_size": group,
        "dynamic": False,
    }


def _activations(activations: Activations, *, static: bool) -> dict[str, object] | None:
    """Inputs are quantised token by token as they come, or all with the scale that is stored."""
    if activations == "16-bit":
        return None
    kind, strategy = "float" if activations == "fp8" else "int", "tensor" if static else "token"
    return {"num_bits": 8, "type": kind, "symmetric": True, "strategy": strategy, "group_size": None, "dynamic": not static}


def _mixed_siblings(schemes: Mapping[str, ModuleScheme]) -> list[str]:
    mixed = [
        name
        for name in schemes
        for siblings in _SIBLINGS
        for one in siblings
        if f".{one}." in name and any(schemes.get(name.replace(one, other)) != schemes[name] for other in siblings)
    ]
    if not mixed:
        return []
    return [
        f"{len(mixed)} projections, first {mixed[0]}, are on another grid than those that runtimes fuse them with; vLLM refuses such layers"
    ]
