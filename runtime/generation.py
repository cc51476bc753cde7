"""Reads a bundle's model files: default sampling, the ids that end a sequence, tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ..errors import BundleError
from .bundle import Bundle
from .chat import ChatTemplate
from .partial_tokenizer import PartialTokenizer
from .sampling_params import SamplingParams
from .tokenizer import Tokenizer
from .tokenizer_index import INDEX_NAME, TokenizerIndex
from .tokenizer_library import AbsentTokenizer, WholeTokenizer


def read_json(bundle: Bundle, name: str) -> dict[str, Any]:
    """A JSON object of the bundle, or an empty one if the bundle does not hold the file; raises BundleError."""
    if not bundle.has(name):
        return {}
    try:
        return msgspec.json.decode(bundle.read(name), type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BundleError(f"{bundle.root / name}: not a JSON object: {error}; compile the bundle again") from None


def read_tokenizer(bundle: Bundle) -> Tokenizer:
    """The bundle's tokenizer, or one that refuses text for a bundle compiled from a config alone; raises BundleError."""
    config = read_json(bundle, "tokenizer_config.json")
    if not bundle.has("tokenizer.json"):
        return Tokenizer(AbsentTokenizer(), {})
    if not bundle.has(INDEX_NAME):
        return Tokenizer(_read_whole(bundle), config)
    where = bundle.root / INDEX_NAME
    index = TokenizerIndex(bundle.take(INDEX_NAME), where)
    if index.source_sha256 != bundle.manifest.files["tokenizer.json"].sha256:
        raise BundleError(f"{where}: made from another tokenizer.json; compile the bundle again")
    return Tokenizer(PartialTokenizer(index, lambda: _read_whole(bundle), str(where)), config)


def _read_whole(bundle: Bundle) -> WholeTokenizer:
    return WholeTokenizer(bytes(bundle.take("tokenizer.json")), str(bundle.root / "tokenizer.json"))


def read_chat_template(bundle: Bundle, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The model's chat template, or None if it has none; raises BundleError."""
    name = "chat_template.jinja"
    if not bundle.has(name):
        return None
    where = str(bundle.root / name)
    try:
        source = bundle.read(name).decode()
    except UnicodeDecodeError as error:
        raise BundleError(f"{where}: not UTF-8 text: {error}") from None
    return ChatTemplate(source, tokenizer.special_tokens, where)


def read_default_params(bundle: Bundle) -> SamplingParams:
    """The sampling that generation_config.json asks for."""
    return SamplingParams.from_generation_config(read_json(bundle, "generation_config.json"))


def read_end_ids(bundle: Bundle, tokenizer: Tokenizer) -> frozenset[int]:
    """Every id that ends a sequence: of generation_config.json, of config.json, and the tokenizer's own.

    Chat models list their end-of-turn token in generation_config.json.
    """
    config = read_json(bundle, "config.json")
    text_config = config.get("text_config")
    sources = [read_json(bundle, "generation_config.json"), config]
    if isinstance(text_config, Mapping):
        sources.append(dict(text_config))
    ids: set[int] = set()
    for source in sources:
        value = source.get("eos_token_id")
        ids.update(item for item in (value if isinstance(value, list) else [value]) if isinstance(item, int))
    if tokenizer.eos_id is not None:
        ids.add(tokenizer.eos_id)
    return frozenset(ids)
