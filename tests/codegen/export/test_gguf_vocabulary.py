"""Vocabularies: names of pre-tokenizers agree with the reader's, and what GGUF cannot say is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from llmc.codegen.export.gguf_vocabulary import SPLITS, add_vocabulary
from llmc.compiler.checkpoint.gguf_tokenizer import PRE_TOKENIZERS
from llmc.errors import UnsupportedModelError

_LETTERS = {letter: index for index, letter in enumerate("abcĠ")}
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True, "trim_offsets": True}

_FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
_SPECIAL = {"id": 6, "content": "<x>", "special": True, **_FLAGS}


def _write(folder: Path, model: dict[str, Any], pre: dict[str, Any] | None = None, **parts: Any) -> Path:
    text = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": pre,
        "post_processor": None,
        "decoder": None,
    }
    (folder / "tokenizer.json").write_text(json.dumps(text | {"model": model} | parts))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "c"}))
    return folder


def _add(folder: Path, vocab_size: int = 8) -> dict[str, Any]:
    writer = gguf.GGUFWriter(None, "llama")
    add_vocabulary(writer, folder, vocab_size=vocab_size, generation_config={"eos_token_id": [1, 2]}, config_ids={"bos": 0})
    return {key: value.value for key, value in writer.kv_data[0].items()}


def _bpe(**changes: Any) -> dict[str, Any]:
    return {"type": "BPE", "vocab": _LETTERS | {"ab": 4}, "merges": [["a", "b"]], "byte_fallback": False} | changes


def test_expressions_are_the_readers() -> None:
    assert {name: PRE_TOKENIZERS[name] for name in SPLITS.values()} == {name: text for text, name in SPLITS.items()}


def test_byte_level(tmp_path: Path) -> None:
    keys = _add(_write(tmp_path, _bpe(), _BYTE_LEVEL, added_tokens=[_SPECIAL]))
    assert keys["tokenizer.ggml.model"] == "gpt2"
    assert keys["tokenizer.ggml.pre"] == "gpt-2"
    assert keys["tokenizer.ggml.tokens"] == ["a", "b", "c", "Ġ", "ab", "[PAD5]", "<x>", "[PAD7]"]
    assert keys["tokenizer.ggml.token_type"] == [1, 1, 1, 1, 1, 5, 3, 5]
    assert keys["tokenizer.ggml.merges"] == ["a b"]
    assert (keys["tokenizer.ggml.bos_token_id"], keys["tokenizer.ggml.eos_token_id"]) == (0, 2)
    assert keys["tokenizer.ggml.eot_token_id"] == 1
    assert keys["tokenizer.ggml.add_eos_token"] is False


def test_sentencepiece_scores_follow_the_merges(tmp_path: Path) -> None:
    vocab = {token: i for i, token in enumerate(["<unk>", "<0x41>", "\u2581", "a", "b", "\u2581a", "ab"])}
    model = _bpe(vocab=vocab, merges=[["a", "b"], ["\u2581", "a"]], byte_fallback=True, unk_token="<unk>")
    keys = _add(_write(tmp_path, model))
    assert keys["tokenizer.ggml.model"] == "llama"
    assert keys["tokenizer.ggml.add_space_prefix"] is False
    scores = dict(zip(keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.scores"], strict=True))
    assert scores["ab"] > scores["\u2581a"] > scores["a"]
    assert keys["tokenizer.ggml.token_type"][1] == 6
    assert keys["tokenizer.ggml.unknown_token_id"] == 0


@pytest.mark.parametrize(
    ("model", "pre", "vocab_size", "message"),
    [
        ({"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}, None, 8, "WordLevel"),
        (_bpe(merges=[]), _BYTE_LEVEL, 8, "no merges"),
        (_bpe(), {"type": "Whitespace"}, 8, "Whitespace"),
        (_bpe(), _BYTE_LEVEL, 4, "4 rows"),
    ],
)
def test_what_gguf_cannot_say(
    tmp_path: Path, model: dict[str, Any], pre: dict[str, Any] | None, vocab_size: int, message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        _add(_write(tmp_path, model, pre), vocab_size)
