"""Reads and checks the tokenizer part of GGUF metadata: tokens, their kinds, merges, special ids and flags."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...errors import CheckpointError, UnsupportedModelError
from .base import token_ids
from .gguf_reader import GgufReader

MODELS = ("llama", "gpt2")  # SentencePiece BPE with byte fallback; byte-level BPE
CONTROL, USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type

# Texts that end a turn in the chat formats of the supported families; files often name only one of them by id.
_END_OF_TURN = frozenset({"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<end_of_turn>"})
# Pre-tokenizers for which llama.cpp adds a BOS unless the file says otherwise.
_BOS_BY_DEFAULT = frozenset({"llama3", "llama-v3", "llama-bpe"})


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufVocabulary:
    """A checked vocabulary; a token's id is its position in `tokens`."""

    path: Path
    architecture: str
    model: str
    pre: str
    tokens: list[str]
    kinds: list[int]  # as long as tokens; 1 (normal) where the file has no token types
    scores: list[float]  # as long as tokens; empty where the file has none
    merges: list[str] | None
    special: dict[str, int]  # "bos" | "eos" | "unk" | "pad" -> id
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    chat_template: str | None


def read_vocabulary(reader: GgufReader) -> GgufVocabulary:
    """Raises `CheckpointError` for absent or contradictory metadata, `UnsupportedModelError` for other models."""
    tokens = reader.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise CheckpointError(f"{reader.path}: metadata has no tokenizer.ggml.tokens; use a file with a vocabulary")
    model = reader.metadata.get("tokenizer.ggml.model")
    if model not in MODELS:
        raise UnsupportedModelError(
            f"{reader.path}: tokenizer.ggml.model {model!r} is not supported; supported: {', '.join(MODELS)}"
        )
    pre = _text(reader, "tokenizer.ggml.pre") or "default"
    kinds, scores = (_per_token(reader, key, len(tokens)) for key in ("token_type", "scores"))
    merges = reader.metadata.get("tokenizer.ggml.merges")
    if model == "llama" and merges is None and not scores:
        raise CheckpointError(f"{reader.path}: metadata has no tokenizer.ggml.scores or merges; convert it again")
    if (model == "gpt2" and merges is None) or not isinstance(merges, list | None):
        raise CheckpointError(f"{reader.path}: metadata has no list tokenizer.ggml.merges; convert it again")
    by_default = model == "llama" or pre in _BOS_BY_DEFAULT
    return GgufVocabulary(
        path=reader.path,
        architecture=str(reader.metadata.get("general.architecture")),
        model=str(model),
        pre=pre,
        tokens=tokens,
        kinds=[int(kind) for kind in kinds] or [1] * len(tokens),
        scores=scores,
        merges=merges,
        special=_special_ids(reader, len(tokens)),
        add_bos=_flag(reader, "add_bos_token", by_default),
        add_eos=_flag(reader, "add_eos_token", False),
        add_space_prefix=_flag(reader, "add_space_prefix", model == "llama"),
        chat_template=_text(reader, "tokenizer.chat_template"),
    )


def end_of_turn_ids(reader: GgufReader) -> list[int]:
    """Every id that ends a generation: the file's eos, eot and eom ids, and special tokens known to end a turn."""
    ids: list[object] = [reader.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    tokens = reader.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list):
        kinds = _per_token(reader, "token_type", len(tokens))
        for index, token in enumerate(tokens):
            if token in _END_OF_TURN and (not kinds or kinds[index] in (CONTROL, USER_DEFINED)):
                ids.append(index)
    return token_ids(ids)


def _special_ids(reader: GgufReader, count: int) -> dict[str, int]:
    special: dict[str, int] = {}
    for kind, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        value = reader.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if value is None:
            continue
        if not isinstance(value, int) or not 0 <= value < count:
            raise CheckpointError(f"{reader.path}: tokenizer.ggml.{key}_token_id is {value!r}, expected an id below {count}")
        special[kind] = value
    return special


def _per_token(reader: GgufReader, key: str, count: int) -> list[float]:
    value = reader.metadata.get(f"tokenizer.ggml.{key}")
    if value is None:
        return []
    if not isinstance(value, np.ndarray) or len(value) != count:
        found = f"{len(value)} values" if isinstance(value, np.ndarray | list) else repr(value)
        raise CheckpointError(f"{reader.path}: tokenizer.ggml.{key} holds {found}, expected one for each of {count} tokens")
    values: list[float] = value.tolist()
    return values


def _text(reader: GgufReader, key: str) -> str | None:
    value = reader.metadata.get(key)
    if value is not None and not isinstance(value, str):
        raise CheckpointError(f"{reader.path}: metadata {key} is {type(value).__name__}, expected a string")
    return value


def _flag(reader: GgufReader, key: str, default: bool) -> bool:
    value = reader.metadata.get(f"tokenizer.ggml.{key}", default)
    if not isinstance(value, bool):
        raise CheckpointError(f"{reader.path}: tokenizer.ggml.{key} is {value!r:.60}, expected a boolean")
    return value
