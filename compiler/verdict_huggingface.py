"""The verdict on a Hugging Face folder: its quantization_config against the headers of its safetensors files."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .checkpoint.base import read_json_object
from .safetensors_header import TensorHeader, read_header
from .verdict import StoredMatrix, Verdict, in_layer, tabulate

_FLOATS = ("F64", "F32", "F16", "BF16")
_MAIN = ("weight_packed", "qweight", "weight")  # the tensor that holds a module's weights, whatever the format
_CODES = ("I8", "U8", "I32", "F8_E4M3", "F8_E5M2")
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Claim:
    """`bits(module)` is what the config says a weight of a linear module takes; None if it is not to be quantised."""

    text: str
    bits: Callable[[str], int | None]
    group: int | None = None


def judge_folder(path: Path) -> Verdict:
    """Raises `CheckpointError` if the folder has no config.json or no safetensors; damaged files are problems of the verdict."""
    config: _Json = read_json_object(path / "config.json")
    files = _weight_files(path)
    claim = _claim(config)
    modules: dict[str, dict[str, TensorHeader]] = defaultdict(dict)
    problems: list[str] = []
    for file in files:
        try:
            for name, header in read_header(file).items():
                module, _, suffix = name.rpartition(".")
                modules[module][suffix] = header
        except CheckpointError as error:
            problems.append(str(error))
    matrices: list[StoredMatrix] = []
    wrong: dict[str, list[str]] = defaultdict(list)
    for module, tensors in sorted(modules.items()):
        main = next((suffix for suffix in _MAIN if suffix in tensors and len(tensors[suffix].shape) >= 2), None)
        if main is None:
            continue
        is_layer = in_layer(f"{module}.")
        bits = claim.bits(module) if is_layer else None
        weights = _num_weights(main, tensors, bits, claim)
        header = tensors[main]
        matrices.append(
            StoredMatrix(name=module, type_name=header.dtype, weights=weights, num_bytes=header.num_bytes, in_layer=is_layer)
        )
        if is_layer and (problem := _contradiction(header, bits, 8 * header.num_bytes / max(weights, 1))):
            wrong[problem].append(module)
    problems += [
        f"the config claims {claim.text}, but {len(names)} matrices {text}, first {names[0]}" for text, names in wrong.items()
    ]
    return Verdict(path=path, claimed=claim.text, rows=tabulate(matrices), problems=problems)


def is_model_folder(path: Path) -> bool:
    """Whether it is a Hugging Face folder with weights in safetensors."""
    return (path / "config.json").is_file() and any((path / name).is_file() for name in (_SINGLE, _INDEX))


def _weight_files(path: Path) -> list[Path]:
    if not (path / _INDEX).is_file():
        if not (path / _SINGLE).is_file():
            raise CheckpointError(f"{path}: neither {_SINGLE} nor {_INDEX}; expected a save_pretrained folder")
        return [path / _SINGLE]
    weight_map = read_json_object(path / _INDEX).get("weight_map")
    names = set(weight_map.values()) if isinstance(weight_map, dict) else set()
    if not names or not all(isinstance(name, str) and Path(name).name == name and (path / name).is_file() for name in names):
        raise CheckpointError(f"{path / _INDEX}: expected a weight_map to files in this folder; download the model again")
    return sorted(path / name for name in names)


def _contradiction(header: TensorHeader, claimed: int | None, found: float) -> str | None:
    """What is wrong with one matrix of a layer, in words that are the same for the same fault."""
    if claimed is None:
        return f"are stored as {header.dtype}" if header.dtype in _CODES else None
    if header.dtype in _FLOATS:
        return f"are stored unquantised as {header.dtype}"
    if not claimed - 0.01 <= found <= claimed * 1.15:  # the last word of a row may be partly empty
        return f"take {found:.3g} bits a weight, not {claimed}"
    return None


def _num_weights(main: str, tensors: dict[str, TensorHeader], bits: int | None, claim: _Claim) -> int:
    """How many weights a matrix holds, from its scales wherever these tell, so that a wrong claim of bits shows."""
    shape = tensors[main].shape
    if main == "weight":
        packs = tensors["weight"].dtype == "U8" and bits == 4  # bitsandbytes keeps two codes in a byte
        return prod(shape) * (2 if packs else 1)
    group, per_word = claim.group, 32 // (bits or 8)
    if main == "weight_packed":
        scale = tensors.get("weight_scale")
        if scale is not None and group and len(scale.shape) == len(shape):
            return prod(scale.shape) * group
        return prod(shape) * per_word
    scales = tensors.get("scales")  # qweight: GPTQ packs rows, AWQ columns
    if scales is not None and len(scales.shape) == 2:
        if shape[1] == scales.shape[1] and group:  # [K * bits / 32, N], scales [K / group, N]
            return scales.shape[0] * group * shape[1]
        if shape[1] != scales.shape[1]:  # [K, N * bits / 32], scales [K / group, N]
            return shape[0] * scales.shape[1]
    return prod(shape) * per_word


def _claim(config: _Json) -> _Claim:
    quantization = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    if not isinstance(quantization, dict):
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "no type").removeprefix("torch.")
        return _Claim(text=f"no quantisation ({dtype})", bits=lambda module: None)
    method = str(quantization.get("quant_method"))
    if method == "compressed-tensors":
        return _compressed_tensors(quantization)
    bits = {"fp8": 8, "fbgemm_fp8": 8}.get(method, quantization.get("bits", quantization.get("w_bit")))
    if method == "bitsandbytes":
        bits = 4 if quantization.get("load_in_4bit") else 8
    if not isinstance(bits, int) or not 1 <= bits <= 8:
        return _Claim(text=f"{method}, which is not known here", bits=lambda module: None)
    skipped = tuple(map(str, quantization.get("modules_to_not_convert") or quantization.get("ignored_layers") or ()))
    group = quantization.get("group_size", quantization.get("q_group_size"))
    return _Claim(
        text=f"{method}, {bits} bits",
        bits=lambda module: None if any(part in module for part in skipped) else bits,
        group=group if isinstance(group, int) and group > 0 else None,
    )


def _compressed_tensors(quantization: _Json) -> _Claim:
    """Each group names its modules by class, by name or by `re:` expression; `ignore` takes modules out of all of them."""
    groups: list[tuple[list[str], int]] = []
    sizes: set[int] = set()
    for scheme in (quantization.get("config_groups") or {}).values():
        weights = (scheme.get("weights") or {}) if isinstance(scheme, dict) else {}
        if isinstance(weights.get("num_bits"), int):
            groups.append(([str(target) for target in scheme.get("targets") or ()], weights["num_bits"]))
            sizes.add(weights.get("group_size") or 0)
    ignored = [str(name) for name in quantization.get("ignore") or ()]

    def bits(module: str) -> int | None:
        if any(_matches(module, name) for name in ignored):
            return None
        return next((b for targets, b in groups if any(t == "Linear" or _matches(module, t) for t in targets)), None)

    kinds = ", ".join(sorted({f"{b} bits" for _, b in groups})) or "no weights"
    group = sizes.pop() if len(sizes) == 1 else 0
    return _Claim(
        text=f"compressed-tensors {quantization.get('format')}, {kinds}", bits=bits, group=group if group > 0 else None
    )


def _matches(module: str, pattern: str) -> bool:
    if pattern.startswith("re:"):
        try:
            return re.match(pattern.removeprefix("re:"), module) is not None
        except re.error:
            return False
    return module == pattern
