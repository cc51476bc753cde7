"""Compiles tiny models once for all end-to-end tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import llmc
import pytest


@pytest.fixture(scope="session")
def tiny_bundle(tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_bundle("llama", "f32")` -> a compiled bundle of `tiny_checkpoint("llama")`."""
    made: dict[tuple[str, str, int], Path] = {}

    def make(architecture: str, quantization: str, max_tokens: int = 128, **overrides: Any) -> Path:
        key = (f"{architecture}{sorted(overrides.items())}", quantization, max_tokens)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("bundles") / "model.llmc"
            llmc.compile(
                tiny_checkpoint(architecture, **overrides),
                target="cpu-int8",
                quantization=quantization,
                max_tokens=max_tokens,
                cpu_levels=("native",),
                output=made[key],
            )
        return made[key]

    return make
