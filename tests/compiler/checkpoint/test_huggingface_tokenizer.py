"""A folder's tokenizer arrives in the bundle as tokenizer.json, tokenizer_config.json and chat_template.jinja."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from llmc.compiler.checkpoint.huggingface_tokenizer import end_of_turn_ids, has_tokenizer_files, write_tokenizer_files
from llmc.errors import CheckpointError
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    tokenizer = Tokenizer(BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    tokenizer.add_special_tokens(["<s>", "</s>", "<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": {"content": "<|end|>"}, "chat_template": TEMPLATE, "auto_map": {"AutoTokenizer": "x.py"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_files_are_copied_and_the_template_extracted(folder: Path, tmp_path: Path) -> None:
    (folder / "special_tokens_map.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    out = tmp_path / "out"
    write_tokenizer_files(folder, out)
    assert sorted(file.name for file in out.iterdir()) == [
        "chat_template.jinja",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert (out / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert (out / "chat_template.jinja").read_text() == TEMPLATE
    config = json.loads((out / "tokenizer_config.json").read_text())
    assert config == {"bos_token": "<s>", "eos_token": {"content": "<|end|>"}}


@pytest.mark.parametrize("where", ["jinja file", "named list", "json file", "nowhere"])
def test_places_of_the_template(where: str, folder: Path, tmp_path: Path) -> None:
    config: dict[str, object] = {}
    if where == "jinja file":
        (folder / "chat_template.jinja").write_text(TEMPLATE)
        config["chat_template"] = "older"
    elif where == "named list":
        config["chat_template"] = [{"name": "tool", "template": "x"}, {"name": "default", "template": TEMPLATE}]
    elif where == "json file":
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    write_tokenizer_files(folder, tmp_path / "out")
    written = tmp_path / "out" / "chat_template.jinja"
    assert written.read_text() == TEMPLATE if where != "nowhere" else not written.exists()


def test_eos_id_comes_from_the_added_tokens(folder: Path) -> None:
    assert end_of_turn_ids(folder) == [5]
    (folder / "tokenizer_config.json").write_text('{"eos_token": "b"}')
    assert end_of_turn_ids(folder) == []
    (folder / "tokenizer_config.json").unlink()
    assert end_of_turn_ids(folder) == []


def test_no_tokenizer(tmp_path: Path) -> None:
    assert not has_tokenizer_files(tmp_path)
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json or tokenizer\.model"):
        write_tokenizer_files(tmp_path, tmp_path / "out")


@pytest.mark.parametrize("content", [b"", b"{}", b'{"version": "1.0", "model": {"type": "?"}}', b"\xff"])
def test_damaged_tokenizer(content: bytes, folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        write_tokenizer_files(folder, tmp_path / "out")


def test_damaged_sentencepiece_model(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match="cannot convert the tokenizer") as caught:
        write_tokenizer_files(folder, tmp_path / "out")
    assert "\n" not in str(caught.value)


def test_vocabulary_and_merges_are_converted(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.json").unlink()
    letters = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    (folder / "vocab.json").write_text(json.dumps({**letters, "ab": 256, "<|endoftext|>": 257}))
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    write_tokenizer_files(folder, tmp_path / "out")
    found = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert found.encode("ab<|endoftext|>").ids == [256, 257]
