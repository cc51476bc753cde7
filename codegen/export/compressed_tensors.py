"""Writes a model folder in the compressed-tensors format of vLLM and transformers, reads it back, and compares before it gets its name."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from ...errors import UsageError
from ...formats.floats import from_fp8, quantize_fp8
from .base import ExportModel, ExportReport, StoredModel, check_new
from .compressed_config import Activations, ModuleScheme, choose_schemes, quantization_config
from .packed_codes import pack_matrix, unpack_matrix, zero_points
from .reopened import Differences

MAX_SHARD_BYTES: Final = 4 << 30

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_KINDS: Final = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def export_compressed_tensors(
    out: Path,
    model: ExportModel,
    *,
    activations: Activations = "16-bit",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    reopen: Callable[[Path], StoredModel],
) -> ExportReport:
    """Write `model` as the folder `out`, which must not exist: config, safetensors, generation config and tokenizer.

    Matrices on a grid of 4 or 8 bits keep their codes and scales; embedding, head, norms and biases are stored in the config's dtype,
    or bfloat16. With `int8` activations, int8 weights with a scale a row are stored for W8A8; with `fp8`, layers become E4M3 with a
    scale a row. Where the model has an `input_step`, it is stored as `input_scale`.
    Before the folder gets its name it is opened with safetensors and with `reopen`, and types, shapes and values are compared. Raises
    `UsageError` for grids that the format does not hold and `VerificationError`, leaving no folder, if the comparison fails.
    """
    check_new(out)
    schemes, notes = choose_schemes(model, activations)
    _check_zero_points(model, schemes)
    dtype = _DTYPES.get(str(getattr(model.config, "dtype", None)).removeprefix("torch."), torch.bfloat16)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        partial.mkdir()
        sizes = _write_weights(partial, model, schemes, dtype, max_shard_bytes)
        _write_configs(partial, model, quantization_config(schemes, model, activations), dtype)
        if model.has_tokenizer:
            model.write_tokenizer(partial)
        differences = Differences(str(out))
        _compare(partial, reopen(partial), model, schemes, dtype, differences)
        differences.check()
        os.rename(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    if not model.has_tokenizer:
        notes.append("the model has no tokenizer, so the folder has none")
    return ExportReport(
        output=out,
        num_bytes=sum(file.stat().st_size for file in out.iterdir()),
        tensors=dict(Counter(_label(schemes.get(name), dtype) for name in model.tensor_names())),
        bytes_by_type=dict(sizes),
        notes=notes,
        exact=sum(scheme.grid is not None for scheme in schemes.values()),
        errors=differences.errors,
    )


def _stored(name: str, model: ExportModel, scheme: ModuleScheme | None, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of one parameter by their full names."""
    if scheme is None:
        return {name: _meant(name, model).to(dtype).contiguous()}
    prefix = name.removesuffix("weight")
    if scheme.kind == "fp8":
        bits, scale = quantize_fp8(model.tensor(name).float().numpy(), fnuz=False)
        weight = torch.from_numpy(bits).view(torch.float8_e4m3fn)
        scales = torch.from_numpy(scale)[:, None].contiguous()
        return {f"{prefix}weight": weight, f"{prefix}weight_scale": scales} | _input_scale(prefix, model.input_step(name))
    value = model.quantized(name)
    if scheme.kind == "int8":
        codes, scales = torch.from_numpy(value.codes.view("i1")), torch.from_numpy(value.scale)
        stored = {f"{prefix}weight": codes.contiguous(), f"{prefix}weight_scale": scales.contiguous()}
        return stored | _input_scale(prefix, model.input_step(name))
    return {prefix + suffix: tensor for suffix, tensor in pack_matrix(value).items()}


def _input_scale(prefix: str, step: float | None) -> dict[str, Tensor]:
    return {} if step is None else {f"{prefix}input_scale": torch.tensor([step])}


def _meant(name: str, model: ExportModel) -> Tensor:
    if model.grid(name) is not None:
        return torch.from_numpy(model.quantized(name).dequantize())
    return model.tensor(name)


def _write_weights(
    folder: Path, model: ExportModel, schemes: Mapping[str, ModuleScheme], dtype: torch.dtype, limit: int
) -> Counter[str]:
    """One file, or shards of at most `limit` bytes (or one parameter) and their index; returns bytes by type."""
    from safetensors.torch import save_file

    shard: dict[str, Tensor] = {}
    held: list[list[str]] = []
    sizes: Counter[str] = Counter()

    def flush() -> None:
        save_file(shard, folder / f"shard-{len(held)}", metadata={"format": "pt"})
        held.append(list(shard))
        shard.clear()

    used = 0
    for name in sorted(model.tensor_names()):
        tensors = _stored(name, model, schemes.get(name), dtype)
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        if shard and used + size > limit:
            flush()
            used = 0
        shard |= tensors
        used += size
        sizes[_label(schemes.get(name), dtype)] += size
    flush()
    names = [_SINGLE] if len(held) == 1 else [f"model-{i + 1:05}-of-{len(held):05}.safetensors" for i in range(len(held))]
    for index, file in enumerate(names):
        os.replace(folder / f"shard-{index}", folder / file)
    if len(names) > 1:
        weight_map = {name: file for file, tensors in zip(names, held, strict=True) for name in tensors}
        _write_json(folder / _INDEX, {"metadata": {"total_size": sizes.total()}, "weight_map": weight_map})
    return sizes


def _write_configs(folder: Path, model: ExportModel, quantization: dict[str, object], dtype: torch.dtype) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = model.config.to_dict()
    for absent in ("_name_or_path", "transformers_version", "torch_dtype"):
        config.pop(absent, None)
    config["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model.config.model_type]]
    config["dtype"] = str(dtype).removeprefix("torch.")
    config["quantization_config"] = quantization
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", dict(model.generation_config))


def _compare(
    folder: Path,
    reopened: StoredModel,
    model: ExportModel,
    schemes: Mapping[str, ModuleScheme],
    dtype: torch.dtype,
    differences: Differences,
) -> None:
    """Names, types, shapes and values as safetensors reads them, and values as a model's reader gives them."""
    found = _read_headers(folder)
    differences.same_names(reopened.tensor_names(), model.tensor_names())
    expected: set[str] = set()
    for name in sorted(model.tensor_names()):
        scheme = schemes.get(name)
        meant = _stored(name, model, scheme, dtype)
        expected |= set(meant)
        if not set(meant) <= set(found):
            continue
        tensors = {stored: _read(folder, found[stored], stored) for stored in meant}
        for stored, tensor in tensors.items():
            differences.equal(f"type of {stored}", tensor.dtype, meant[stored].dtype)
            differences.equal(f"shape of {stored}", list(tensor.shape), list(meant[stored].shape))
        value, kind = _decode(name, tensors, scheme, dtype)
        if scheme is not None and scheme.grid is not None and not scheme.grid.symmetric:
            kind = "rounded scale"  # the zero point stands for a minimum that was rounded to float16
        values = _meant(name, model)
        differences.close(name, value, values, kind)
        if name in reopened.tensor_names():
            differences.close(name, reopened.tensor(name), values, kind)
    differences.same_names(found, expected)


def _decode(name: str, tensors: dict[str, Tensor], scheme: ModuleScheme | None, dtype: torch.dtype) -> tuple[Tensor, str]:
    """What the tensors stand for, by the definition of the format, and how close it must be."""
    if scheme is None:
        return tensors[name].float(), _KINDS[dtype]
    parts = {stored.removeprefix(name.removesuffix("weight")): tensor for stored, tensor in tensors.items()}
    if scheme.kind == "fp8":
        values = torch.from_numpy(from_fp8(parts["weight"].view(torch.uint8).numpy(), fnuz=False))
        return values * parts["weight_scale"], "fp8"
    assert scheme.grid is not None
    if scheme.kind == "int8":
        return parts["weight"].float() * parts["weight_scale"], "exact"
    return unpack_matrix(parts, scheme.grid.bits, scheme.grid.group), "exact"


def _read_headers(folder: Path) -> dict[str, str]:
    """Tensor name -> file that holds it."""
    from safetensors import safe_open

    found: dict[str, str] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as handle:
            found |= dict.fromkeys(handle.keys(), file.name)
    return found


def _read(folder: Path, file: str, name: str) -> Tensor:
    from safetensors import safe_open

    with safe_open(folder / file, framework="pt") as handle:
        tensor: Tensor = handle.get_tensor(name)
    return tensor


def _check_zero_points(model: ExportModel, schemes: Mapping[str, ModuleScheme]) -> None:
    """Refuse, before anything is written, asymmetric matrices that integers for zero cannot express."""
    for name, scheme in schemes.items():
        if scheme.grid is not None and not scheme.grid.symmetric:
            try:
                zero_points(model.quantized(name))
            except ValueError as error:
                raise UsageError(
                    f"export: {name} is on {scheme.grid}, and {error}, which compressed-tensors cannot say; "
                    "quantise without -asym, or export as GGUF"
                ) from None


def _label(scheme: ModuleScheme | None, dtype: torch.dtype) -> str:
    return _KINDS[dtype] if scheme is None else str(scheme.grid or scheme.kind)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
