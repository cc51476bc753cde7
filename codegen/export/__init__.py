"""Exporters: a quantised model in the file formats of other runtimes, read back and compared after writing."""

from __future__ import annotations

from .base import ExportModel, ExportReport, StoredModel, check_new
from .compressed_tensors import export_compressed_tensors
from .gguf import export_gguf

__all__ = ["ExportModel", "ExportReport", "StoredModel", "check_new", "export_compressed_tensors", "export_gguf"]
