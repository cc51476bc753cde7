"""Tokenizer metadata is checked before anything is built from it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from llmc.compiler.checkpoint.gguf_reader import GgufReader
from llmc.compiler.checkpoint.gguf_vocabulary import end_of_turn_ids, read_vocabulary
from llmc.errors import CheckpointError, LlmcError, UnsupportedModelError


@pytest.fixture
def reader(tiny, tmp_path: Path) -> GgufReader:
    tiny.write_gguf(tmp_path / "m.gguf", tiny.make_model("llama", num_hidden_layers=1))
    return GgufReader(tmp_path / "m.gguf")


def change(reader: GgufReader, **changes: object) -> GgufReader:
    for key, value in changes.items():
        if value is None:
            reader.metadata.pop(f"tokenizer.ggml.{key}", None)
        else:
            reader.metadata[f"tokenizer.ggml.{key}"] = value  # type: ignore[assignment]
    return reader


def test_defaults(reader: GgufReader) -> None:
    vocabulary = read_vocabulary(reader)
    assert (vocabulary.model, vocabulary.pre) == ("llama", "default")
    assert (vocabulary.add_bos, vocabulary.add_eos, vocabulary.add_space_prefix) == (True, False, True)
    assert vocabulary.special == {"bos": 1, "eos": 2, "pad": 0}
    assert vocabulary.chat_template is None


@pytest.mark.parametrize(("pre", "add_bos"), [("llama-bpe", True), ("qwen2", False), (None, False)])
def test_bos_default_of_byte_level_models(pre: str | None, add_bos: bool, reader: GgufReader) -> None:
    assert read_vocabulary(change(reader, model="gpt2", merges=[], pre=pre)).add_bos is add_bos


def test_flags_win_over_defaults(reader: GgufReader) -> None:
    vocabulary = read_vocabulary(change(reader, add_bos_token=False, add_eos_token=True, add_space_prefix=False))
    assert (vocabulary.add_bos, vocabulary.add_eos, vocabulary.add_space_prefix) == (False, True, False)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": None}, "no tokenizer.ggml.tokens"),
        ({"tokens": []}, "no tokenizer.ggml.tokens"),
        ({"tokens": np.zeros(3)}, "no tokenizer.ggml.tokens"),
        ({"scores": None}, "no tokenizer.ggml.scores or merges"),
        ({"scores": np.zeros(3)}, "scores holds 3 values, expected one for each of 24 tokens"),
        ({"token_type": ["a"]}, "token_type holds 1 values"),
        ({"token_type": 7}, "token_type holds 7"),
        ({"model": "gpt2"}, "no list tokenizer.ggml.merges"),
        ({"merges": 3}, "no list tokenizer.ggml.merges"),
        ({"bos_token_id": 24}, "bos_token_id is 24, expected an id below 24"),
        ({"eos_token_id": "x"}, "eos_token_id is 'x'"),
        ({"add_bos_token": 3}, "add_bos_token is 3, expected a boolean"),
        ({"pre": 5}, "tokenizer.ggml.pre is int"),
    ],
)
def test_contradictions_are_one_sentence(changes: dict[str, object], words: str, reader: GgufReader) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_vocabulary(change(reader, **changes))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model", ["t5", "bert", None, 3])
def test_other_models_are_named(model: object, reader: GgufReader) -> None:
    with pytest.raises(UnsupportedModelError, match="is not supported; supported: llama, gpt2"):
        read_vocabulary(change(reader, model=model))


def test_end_of_turn_ids(reader: GgufReader) -> None:
    assert end_of_turn_ids(reader) == [2]
    tokens = list(reader.metadata["tokenizer.ggml.tokens"])  # type: ignore[arg-type]
    tokens[20:23] = ["<end_of_turn>", "<|im_end|>", "<|eot_id|>"]
    kinds = np.array([3] * 22 + [1, 1], dtype=np.int32)  # the last one is ordinary text
    change(reader, tokens=tokens, token_type=kinds, eot_token_id=5, eom_token_id=-1)
    assert end_of_turn_ids(reader) == [2, 5, 20, 21]
    assert end_of_turn_ids(change(reader, tokens=None)) == [2, 5]
    with pytest.raises(LlmcError):
        end_of_turn_ids(change(reader, tokens=["a"]))
