"""Copies a model folder's tokenizer into a bundle, converting older layouts to tokenizer.json."""

from __future__ import annotations

import shutil
from pathlib import Path

from ...errors import CheckpointError
from .base import one_line, read_json_object, write_json

_SLOW_FILES = ("tokenizer.model", "vocab.json")  # SentencePiece; byte-level BPE beside merges.txt


def has_tokenizer_files(folder: Path) -> bool:
    """Whether the folder holds a tokenizer in a layout that `write_tokenizer_files` reads."""
    return any((folder / file).is_file() for file in ("tokenizer.json", *_SLOW_FILES))


def write_tokenizer_files(folder: Path, out: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja (if the model has one) into `out`."""
    if not has_tokenizer_files(folder):
        raise CheckpointError(f"{folder}: no tokenizer.json or tokenizer.model; copy the model's files there")
    out.mkdir(parents=True, exist_ok=True)
    if (folder / "tokenizer.json").is_file():
        _check_loads(folder / "tokenizer.json")
        shutil.copyfile(folder / "tokenizer.json", out / "tokenizer.json")
    else:
        _convert(folder, out)
    config = _tokenizer_config(folder)
    template = _chat_template(folder, config)
    config.pop("chat_template", None)
    config.pop("auto_map", None)  # names of Python files to execute, which a bundle never holds
    write_json(out / "tokenizer_config.json", config)
    if template is not None:
        (out / "chat_template.jinja").write_text(template, encoding="utf-8")


def end_of_turn_ids(folder: Path) -> list[int]:
    """The id of the tokenizer's `eos_token`, which chat models often set to their end-of-turn token."""
    config = _tokenizer_config(folder)
    content = _content(config.get("eos_token"))
    if content is None:
        return []
    added = config.get("added_tokens_decoder")
    if isinstance(added, dict):
        found = [int(key) for key, value in added.items() if _content(value) == content and str(key).isdigit()]
        if found:
            return found
    if not (folder / "tokenizer.json").is_file():
        return []
    entries = read_json_object(folder / "tokenizer.json").get("added_tokens")
    entries = entries if isinstance(entries, list) else []
    return [entry["id"] for entry in entries if _content(entry) == content and isinstance(entry.get("id"), int)]


def _tokenizer_config(folder: Path) -> dict[str, object]:
    """Older checkpoints name some special tokens only in special_tokens_map.json."""
    files = [folder / "special_tokens_map.json", folder / "tokenizer_config.json"]
    merged: dict[str, object] = {}
    for file in files:
        if file.is_file():
            merged |= {key: value for key, value in read_json_object(file).items() if value is not None}
    return merged


def _content(token: object) -> str | None:
    """A special token is written either as its text or as an object with `content`."""
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else None


def _chat_template(folder: Path, config: dict[str, object]) -> str | None:
    """The default template: its own file, or a string, or the entry named "default" of a list."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if template is None and (folder / "chat_template.json").is_file():
        template = read_json_object(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _check_loads(file: Path) -> None:
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_file(str(file))
    except Exception as error:  # the binding raises a bare Exception
        raise CheckpointError(f"{file}: tokenizers cannot load it ({one_line(error)}); download it again") from error


def _convert(folder: Path, out: Path) -> None:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        backend = tokenizer.backend_tokenizer
    except Exception as error:  # transformers raises many types, among them ImportError for absent sentencepiece
        raise CheckpointError(
            f"{folder}: no tokenizer.json, and transformers cannot convert the tokenizer there "
            f"({one_line(error)}); save a fast tokenizer with save_pretrained"
        ) from error
    backend.save(str(out / "tokenizer.json"))
