"""Loads a bundle and serves it; imports neither the compiler nor torch."""

from __future__ import annotations

from ..errors import BundleError, CapacityError, LlmcError, RequestError, UsageError
from .bundle import Bundle
from .engine import Engine
from .loading import load
from .outputs import Chunk, Output, Stats
from .sampling_params import SamplingParams

__all__ = [
    "Bundle",
    "BundleError",
    "CapacityError",
    "Chunk",
    "Engine",
    "LlmcError",
    "Output",
    "RequestError",
    "SamplingParams",
    "Stats",
    "UsageError",
    "load",
]
