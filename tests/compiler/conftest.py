"""Compiles tiny models once for all end-to-end tests."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llmc
import pytest

_EXPORTABLE_SIZES: dict[str, dict[str, Any]] = {
    "llama": {
        "max_position_embeddings": 1024,
        "intermediate_size": 128,
        "rope_parameters": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
            "rope_theta": 10000.0,
        },
    },
    "gemma3": {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "query_pre_attn_scalar": 32},
    "qwen2": {},
    "qwen3": {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64},
    "mistral": {"intermediate_size": 128, "sliding_window": None},
}


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


@pytest.fixture(scope="session")
def exportable(tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`exportable("llama")` -> a folder with a tokenizer that has merges, without which llama.cpp loads no file, and a chat template."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            folder = made[family] = tmp_path_factory.mktemp("export") / family
            shutil.copytree(tiny_checkpoint(family, **_EXPORTABLE_SIZES[family]), folder)
            text = json.loads((folder / "tokenizer.json").read_text())
            for left, right in (("t", "h"), ("th", "e"), ("Ġ", "the")):
                text["model"]["vocab"][left + right] = len(text["model"]["vocab"])
                text["model"]["merges"].append([left, right])
            (folder / "tokenizer.json").write_text(json.dumps(text))
            (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
        return made[family]

    return make
