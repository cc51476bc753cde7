"""Reads weights that are stored quantised: chooses the reader by a config's `quant_method`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ....errors import CheckpointError, UnsupportedModelError
from .awq import AwqFormat
from .base import QuantizedWeight, StoredKind, StoredMatrix, StoredQuantization, summarize
from .compressed_tensors import CompressedTensorsFormat
from .folder import QuantizedFolder
from .format import Format
from .fp8 import Fp8Format
from .gptq import GptqFormat
from .settings import Settings

__all__ = [
    "FORMATS",
    "QuantizedFolder",
    "QuantizedWeight",
    "StoredKind",
    "StoredMatrix",
    "StoredQuantization",
    "summarize",
    "take_format",
]

FORMATS: dict[str, type[Format]] = {
    format.method: format for format in (AwqFormat, GptqFormat, Fp8Format, CompressedTensorsFormat)
}
_KEYS = ("quantization_config", "compression_config")


def take_format(config: dict[str, object], where: Path) -> Format | None:
    """Remove `quantization_config` (or `compression_config`) from the contents of a config.json and return its format.

    None where there is none. Raises `UnsupportedModelError` for a method that is not in `FORMATS`.
    """
    for holder in (config, config.get("text_config")):
        if not isinstance(holder, dict):
            continue
        for key in _KEYS:
            if (entry := holder.pop(key, None)) is not None:
                return _format(entry, f"{where}: {key}")
    return None


def _format(entry: object, where: str) -> Format:
    if isinstance(entry, Mapping) and isinstance(entry.get("quantization_config"), Mapping):
        entry = entry["quantization_config"]  # an older compression_config
    if not isinstance(entry, Mapping):
        raise CheckpointError(f"{where} is {type(entry).__name__}, expected an object with quant_method")
    method = entry.get("quant_method")
    if method is None and "config_groups" in entry:
        method = CompressedTensorsFormat.method
    if not isinstance(method, str) or method.lower() not in FORMATS:
        raise UnsupportedModelError(
            f"{where}.quant_method {method!r} is not supported; supported: {', '.join(sorted(FORMATS))}: "
            "use another quantisation of the model, or its original 16-bit checkpoint"
        )
    return FORMATS[method.lower()](Settings(entry, where))
