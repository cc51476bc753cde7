"""A tokenizer.json as the vocabulary keys of GGUF: tokens, kinds, scores, merges, special ids, and the name of its pre-tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ...errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from gguf import GGUFWriter

Json = dict[str, Any]

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6  # tokenizer.ggml.token_type
_SPACE: Final = "\u2581"
_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

SPLITS: Final = {  # the expression with which tokenizer.json cuts text -> tokenizer.ggml.pre
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}": "llama-bpe",
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}": "qwen2",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+": "tekken",
}


def add_vocabulary(
    writer: GGUFWriter, folder: Path, *, vocab_size: int, generation_config: Mapping[str, object], config_ids: Mapping[str, int]
) -> None:
    """Write the tokenizer of `folder` (tokenizer.json, tokenizer_config.json, chat_template.jinja) into the metadata.

    `config_ids` are the special ids (`bos`, `eos`, `pad`) that the model's config names, for a tokenizer that names none. Raises
    `UnsupportedModelError` for a tokenizer that GGUF cannot express.
    """
    where = folder / "tokenizer.json"
    text = json.loads(where.read_text(encoding="utf-8"))
    settings: Json = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    model = text["model"]
    if model.get("type") != "BPE":
        raise UnsupportedModelError(
            f"export: the tokenizer is a {model.get('type')} model; GGUF export supports byte-level BPE and SentencePiece BPE"
        )
    added: list[Json] = text.get("added_tokens") or []
    tokens, kinds = _tokens(model["vocab"], added, vocab_size, settings, byte_fallback=bool(model.get("byte_fallback")))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges", ())]
    if model.get("byte_fallback"):
        _add_sentencepiece(writer, text, tokens, kinds, merges)
    else:
        _add_byte_level(writer, text, tokens, merges)
    writer.add_token_types(kinds)
    ids = {token: index for index, token in enumerate(tokens)}
    special = _special_ids(settings, ids, config_ids, model.get("unk_token"))
    for kind, index in special.items():
        writer.add_uint32(f"tokenizer.ggml.{ {'pad': 'padding', 'unk': 'unknown'}.get(kind, kind) }_token_id", index)
    _add_turn_ends(writer, generation_config, special.get("eos"))
    bos, eos = _surroundings(where, special)
    writer.add_add_bos_token(bos)
    writer.add_add_eos_token(eos)
    template = folder / "chat_template.jinja"
    if template.is_file():
        writer.add_chat_template(template.read_text(encoding="utf-8"))


def _tokens(
    vocab: dict[str, int], added: Iterable[Json], vocab_size: int, settings: Json, *, byte_fallback: bool
) -> tuple[list[str], list[int]]:
    """Token texts and kinds by id, filled up to the rows of the embedding."""
    by_id: dict[int, tuple[str, int]] = {}
    for token, index in vocab.items():
        is_byte = byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">")
        by_id[index] = (token, _BYTE if is_byte else _NORMAL)
    for entry in added:
        token = entry["content"]
        kind = _CONTROL if entry.get("special") else _USER_DEFINED
        if kind == _USER_DEFINED and byte_fallback:
            token = token.replace(_SPACE, " ")  # llama.cpp looks such tokens up in the text as it comes
        by_id[entry["id"]] = (token, kind)
    unknown = _content(settings.get("unk_token"))
    if max(by_id) >= vocab_size:
        raise UnsupportedModelError(
            f"export: the tokenizer has an id {max(by_id)}, but the model has {vocab_size} rows of embeddings; use files of one model"
        )
    tokens, kinds = [], []
    for index in range(vocab_size):
        token, kind = by_id.get(index, (f"[PAD{index}]", _UNUSED))
        tokens.append(token)
        kinds.append(_UNKNOWN if token == unknown and byte_fallback else kind)
    return tokens, kinds


def _add_byte_level(writer: GGUFWriter, text: Json, tokens: list[str], merges: list[str]) -> None:
    if not merges:
        raise UnsupportedModelError("export: the tokenizer has no merges, and llama.cpp loads no byte-level BPE without them")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_pre_tokenizer(text))
    writer.add_token_list(tokens)
    writer.add_token_merges(merges)


def _add_sentencepiece(writer: GGUFWriter, text: Json, tokens: list[str], kinds: list[int], merges: list[str]) -> None:
    """llama.cpp merges the pair whose result has the best score; so the earlier a merge, the better its result's score."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", ""), rank)
    lowest = -float(len(ranks) + 1)
    scores = [
        -float(ranks[token]) - 1 if token in ranks else 0.0 if kind in (_BYTE, _CONTROL, _UNKNOWN) else lowest
        for token, kind in zip(tokens, kinds, strict=True)
    ]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_add_space_prefix(_adds_space(text))


def _pre_tokenizer(text: Json) -> str:
    """The name under which llama.cpp knows how this tokenizer cuts text."""
    steps = _steps(text.get("pre_tokenizer"), "pretokenizers")
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True) and not steps[0].get("add_prefix_space"):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits") and steps[1].get("use_regex", True):
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and not steps[1].get("use_regex", True):
        expression = steps[0].get("pattern", {}).get("Regex")
        if expression in SPLITS:
            return SPLITS[expression]
    raise UnsupportedModelError(
        f"export: the tokenizer's pre-tokenizer ({' then '.join(kinds) or 'none'}) has no name in GGUF; "
        f"supported: those of gpt-2, smollm, {', '.join(SPLITS.values())}"
    )


def _steps(part: Json | None, key: str) -> list[Json]:
    if part is None:
        return []
    return part[key] if part["type"] == "Sequence" else [part]


def _adds_space(text: Json) -> bool:
    for step in (*_steps(text.get("normalizer"), "normalizers"), *_steps(text.get("pre_tokenizer"), "pretokenizers")):
        if step["type"] == "Prepend" or (step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never"):
            return True
    return False


def _special_ids(settings: Json, ids: Mapping[str, int], config_ids: Mapping[str, int], unknown: str | None) -> dict[str, int]:
    special: dict[str, int] = {}
    for kind in ("bos", "eos", "pad", "unk"):
        token = _content(settings.get(f"{kind}_token")) or (unknown if kind == "unk" else None)
        index = ids.get(token) if token is not None else None
        if index is None:
            index = config_ids.get(kind)
        if index is not None:
            special[kind] = index
    return special


def _add_turn_ends(writer: GGUFWriter, generation_config: Mapping[str, object], eos: int | None) -> None:
    """The ids beside eos that end a turn; GGUF has names for two."""
    ends = generation_config.get("eos_token_id")
    others = [end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int) and end != eos]
    if others:
        writer.add_eot_token_id(others[-1])
    if len(others) > 1:
        writer.add_uint32("tokenizer.ggml.eom_token_id", others[0])


def _surroundings(where: Path, special: Mapping[str, int]) -> tuple[bool, bool]:
    """Whether the tokenizer puts BOS before and EOS after a text."""
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(where)).encode("a").ids
    return bool(ids) and ids[0] == special.get("bos"), bool(ids) and ids[-1] == special.get("eos")


def _content(token: object) -> str | None:
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else None
