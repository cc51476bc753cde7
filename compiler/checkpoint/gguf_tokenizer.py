"""Rebuilds tokenizer.json from the vocabulary, merges and flags in GGUF metadata."""

from __future__ import annotations

from pathlib import Path

from .gguf_reader import GgufReader


def end_of_turn_ids(reader: GgufReader) -> list[int]:
    return []


def write_gguf_tokenizer(reader: GgufReader, out: Path) -> None:
    raise NotImplementedError
