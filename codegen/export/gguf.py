"""Writes a GGUF file one tensor at a time, reads it back, and compares before the file gets its name."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np
import torch

from ...formats.floats import Array
from ...formats.grid import QuantizedMatrix
from . import gguf_blocks, gguf_metadata, gguf_vocabulary
from .base import ExportModel, ExportReport, StoredModel, check_new
from .gguf_types import StoredType, choose_types, file_type
from .reopened import Differences, digest

if TYPE_CHECKING:
    from gguf import GGUFReader, GGUFWriter


def export_gguf(
    out: Path,
    model: ExportModel,
    *,
    type_name: str = "Q4_K",
    head_type: str | None = None,
    chosen: Mapping[str, str] | None = None,
    reopen: Callable[[Path], StoredModel],
) -> ExportReport:
    """Write `model` as the GGUF file `out`, which must not exist.

    Matrices on a grid keep their codes where a block type holds them; others are quantised to `type_name`, embedding and head to
    `head_type`, and single matrices to what `chosen` has for their names.
    Before the file gets its name it is opened with the `gguf` package and with `reopen`, and types, shapes, bytes and values are compared.
    Raises `UnsupportedModelError` for what GGUF cannot express and `VerificationError`, leaving no file, if the comparison fails.
    """
    from gguf import GGUFWriter

    check_new(out)
    architecture = gguf_metadata.architecture(model.config)
    types, notes = choose_types(model, type_name, head_type, chosen)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        writer = GGUFWriter(partial, architecture)
        export = _Export(model, architecture, types, writer)
        notes += export.add_metadata()
        digests = export.write()
        differences = Differences(str(out))
        _compare_container(partial, export, digests, differences)
        _compare_values(reopen(partial), export, differences)
        differences.check()
        os.replace(partial, out)
    finally:
        with suppress(FileNotFoundError):
            partial.unlink()
    sizes: Counter[str] = Counter()
    for name, stored in types.items():
        sizes[stored.type_name] += _num_bytes(model.shape(name), stored.type_name)
    return ExportReport(
        output=out,
        num_bytes=out.stat().st_size,
        tensors=dict(Counter(stored.type_name for stored in types.values())),
        bytes_by_type=dict(sizes),
        notes=notes,
        exact=sum(stored.how == "exact" for stored in types.values()),
        errors=differences.errors,
    )


class _Export:
    """One file: the model, the GGUF names and types of its tensors, and the writer."""

    def __init__(self, model: ExportModel, architecture: str, types: dict[str, StoredType], writer: GGUFWriter) -> None:
        self.model = model
        self.types = types
        self.names = _gguf_names(architecture, model)
        self.source: GGUFReader | None = None
        self.extra: dict[str, Array] = {}  # float32 vectors that are no parameters
        self._writer = writer
        self._architecture = architecture

    def add_metadata(self) -> list[str]:
        """Everything but tensors; returns remarks."""
        from gguf import GGML_QUANT_VERSION

        model, writer = self.model, self._writer
        remarks: list[str] = []
        if model.source_gguf is not None:
            source = gguf_metadata.copy_metadata(model.source_gguf, writer)
            for tensor in source.tensors:
                if tensor.name == gguf_metadata.ROPE_FACTORS:
                    self.extra[tensor.name] = np.array(tensor.data)
        else:
            gguf_metadata.require_tokenizer(model.has_tokenizer, model.name)
            remarks += gguf_metadata.add_architecture_keys(writer, model.config, model.name)
            factors = gguf_metadata.rope_factors(model.config)
            if factors is not None:
                self.extra[gguf_metadata.ROPE_FACTORS] = factors
            self._add_tokenizer()
        writer.add_quantization_version(GGML_QUANT_VERSION)
        writer.add_file_type(file_type(self.types, model))
        return remarks

    def write(self) -> dict[str, bytes]:
        """The whole file; returns the SHA-256 of each tensor's bytes by GGUF name."""
        from gguf import GGMLQuantizationType

        writer, digests = self._writer, {}
        for name, data in self.extra.items():
            writer.add_tensor_info(name, data.shape, data.dtype, data.nbytes)
        for name, gguf_name in self.names.items():
            shape, stored = self.model.shape(name), self.types[name].type_name
            kind, num_bytes = GGMLQuantizationType[stored], _num_bytes(shape, stored)
            writer.add_tensor_info(gguf_name, shape, np.dtype(np.float32), num_bytes, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, data in self.extra.items():
            writer.write_tensor_data(data)
            digests[name] = digest(data)
        for name, gguf_name in self.names.items():
            data = self._stored(name)
            writer.write_tensor_data(data)
            digests[gguf_name] = digest(data)
        writer.close()
        return digests

    def meant(self, name: str) -> torch.Tensor:
        """The values that a reader should find, but for rounding to the stored type."""
        if self.model.grid(name) is not None:
            return torch.from_numpy(self.model.quantized(name).dequantize())
        return self.model.tensor(name).float()

    def _stored(self, name: str) -> Array:
        model, stored = self.model, self.types[name]
        rows = self._row_order(name)
        if stored.how in ("exact", "rounded scale"):
            matrix = _reorder(model.quantized(name), rows)
            if stored.how == "exact":
                return gguf_blocks.pack_exact(matrix, stored.type_name)
            return gguf_blocks.pack_codes_with_rounded_scale(matrix)
        value = self.meant(name)
        if self._architecture == "gemma3" and name.endswith("norm.weight"):
            value = value + 1.0  # llama.cpp multiplies by the weight itself
        value = value if rows is None else value[torch.from_numpy(rows)]
        if stored.how == "floats":
            return gguf_blocks.pack_floats(value, stored.type_name)
        return gguf_blocks.quantize(value, stored.type_name, model.importance(name))

    def _row_order(self, name: str) -> Array | None:
        """Rows of llama's q and k lie so that the two values of a rotary pair are neighbours."""
        if self._architecture != "llama" or not any(part in name for part in (".q_proj.", ".k_proj.")):
            return None
        config = self.model.config
        heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
        rows: Array = np.arange(self.model.shape(name)[0]).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)
        return rows

    def _add_tokenizer(self) -> None:
        config = self.model.config
        ids = {kind: getattr(config, f"{kind}_token_id", None) for kind in ("bos", "eos", "pad")}
        first = {kind: value[0] if isinstance(value, list) and value else value for kind, value in ids.items()}
        with TemporaryDirectory() as folder:
            self.model.write_tokenizer(Path(folder))
            gguf_vocabulary.add_vocabulary(
                self._writer,
                Path(folder),
                vocab_size=config.vocab_size,
                generation_config=self.model.generation_config,
                config_ids={kind: value for kind, value in first.items() if isinstance(value, int)},
            )


def _gguf_names(architecture: str, model: ExportModel) -> dict[str, str]:
    """HF name -> GGUF name, in the order in which tensors are written."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    arch = next(key for key, value in MODEL_ARCH_NAMES.items() if value == architecture)
    table = get_tensor_name_map(arch, model.config.num_hidden_layers)
    names = {}
    for name in sorted(model.tensor_names(), key=_layer_order):
        stem, _, suffix = name.rpartition(".")
        found = table.get_name(stem)
        assert found is not None, f"{name} has no GGUF name in {architecture}"
        names[name] = f"{found}.{suffix}"
    return names


def _layer_order(name: str) -> tuple[int, str]:
    parts = name.split(".")
    return (int(parts[2]) + 1 if parts[:2] == ["model", "layers"] else 0, name)


def _num_bytes(shape: tuple[int, ...], type_name: str) -> int:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    columns, size = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    return prod(shape) // int(columns) * int(size)


def _reorder(value: QuantizedMatrix, rows: Array | None) -> QuantizedMatrix:
    if rows is None:
        return value
    minimum = None if value.minimum is None else value.minimum[rows]
    return QuantizedMatrix(grid=value.grid, codes=value.codes[rows], scale=value.scale[rows], minimum=minimum)


def _compare_container(path: Path, export: _Export, digests: dict[str, bytes], differences: Differences) -> None:
    """Names, types, shapes and bytes as the `gguf` package reads them."""
    from gguf import GGUFReader

    found = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    differences.same_names(found, digests)
    for name, gguf_name in export.names.items():
        if (tensor := found.get(gguf_name)) is None:
            continue
        differences.equal(f"type of {gguf_name}", tensor.tensor_type.name, export.types[name].type_name)
        differences.equal(f"shape of {gguf_name}", tuple(int(d) for d in reversed(tensor.shape)), export.model.shape(name))
        differences.equal(f"checksum of {gguf_name}", digest(tensor.data).hex(), digests[gguf_name].hex())


def _compare_values(found: StoredModel, export: _Export, differences: Differences) -> None:
    """Names, types and values in Hugging Face's order, as a model's reader gives them."""
    differences.same_names(found.tensor_names(), export.names)
    for name in sorted(found.tensor_names() & set(export.names)):
        stored = export.types[name]
        differences.equal(f"type of {name}", found.dtype(name), stored.type_name)
        kind = stored.how if stored.how in ("exact", "rounded scale") else stored.type_name
        meant = export.meant(name)
        value = found.tensor(name).float()
        if name.endswith("norm.weight"):  # gemma's are stored as 1 + w, which costs w its last bits
            value, meant = value + 1, meant + 1
        differences.close(name, value, meant, kind)
