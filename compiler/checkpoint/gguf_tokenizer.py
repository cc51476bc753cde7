"""Builds tokenizer.json and its companions from a GGUF vocabulary, in seconds for 262k tokens."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import CheckpointError, UnsupportedModelError
from .base import one_line, write_json
from .gguf_reader import GgufReader
from .gguf_vocabulary import CONTROL, USER_DEFINED, GgufVocabulary, read_vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

_SPACE = "\u2581"  # SentencePiece writes a space as this character
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_PUNCTUATION_AND_SPACE = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_PUNCTUATION_AND_SPACE}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_PUNCTUATION_AND_SPACE}"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# tokenizer.ggml.pre -> the expression that cuts text before merging; None: the GPT-2 expression of ByteLevel.
PRE_TOKENIZERS: dict[str, str | None] = {
    "default": None,
    "gpt-2": None,
    "smollm": None,  # after cutting digits apart
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}
# A word that is a token is taken whole even if merges would not build it, as these models' own tokenizer.json say.
_IGNORE_MERGES = frozenset({"llama-bpe", "llama-v3", "llama3", "tekken"})


def write_gguf_tokenizer(reader: GgufReader, out: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and, if the file has one, chat_template.jinja into `out`."""
    vocabulary = read_vocabulary(reader)
    tokenizer = build_tokenizer(vocabulary)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": vocabulary.add_bos,
        "add_eos_token": vocabulary.add_eos,
        "clean_up_tokenization_spaces": False,
    }
    context = reader.metadata.get(f"{vocabulary.architecture}.context_length")
    if isinstance(context, int):
        config["model_max_length"] = context
    for kind, token_id in vocabulary.special.items():
        config[f"{kind}_token"] = vocabulary.tokens[token_id]
    write_json(out / "tokenizer_config.json", config)
    if vocabulary.chat_template is not None:
        (out / "chat_template.jinja").write_text(vocabulary.chat_template, encoding="utf-8")


def build_tokenizer(vocabulary: GgufVocabulary) -> Tokenizer:
    """The `tokenizers` object whose ids are positions in the vocabulary."""
    from tokenizers import AddedToken

    tokenizer = _sentencepiece(vocabulary) if vocabulary.model == "llama" else _byte_level(vocabulary)
    known = tokenizer.get_vocab(with_added_tokens=False)
    special_ids = set(vocabulary.special.values())
    special, plain = [], []
    for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True)):
        if kind == CONTROL or index in special_ids:
            special.append(AddedToken(token, normalized=False, special=True))
        elif kind == USER_DEFINED and token in known:
            plain.append(AddedToken(token, normalized=False, special=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)
    _add_template(tokenizer, vocabulary)
    return tokenizer


def _sentencepiece(vocabulary: GgufVocabulary) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers

    gemma = vocabulary.architecture.startswith("gemma")
    tokens = vocabulary.tokens
    if gemma:  # runs of spaces are stored as spaces, but looked up after normalisation
        tokens = [_SPACE * len(token) if " " in token and not token.strip(" ") else token for token in tokens]
    vocab = {token: index for index, token in enumerate(tokens)}
    # Gemma's merge order is its vocabulary's: its scores put user-defined tokens elsewhere.
    ranks = [-float(index) for index in range(len(tokens))] if gemma else vocabulary.scores
    merges = _split_merges(vocabulary) if vocabulary.merges else merges_from_scores(tokens, ranks)
    unknown = tokens[vocabulary.special["unk"]] if "unk" in vocabulary.special else None
    model = _bpe(vocabulary, vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if gemma:
        tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    else:
        prefix = "first" if vocabulary.add_space_prefix else "never"
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme=prefix, split=False)
        if vocabulary.add_space_prefix:
            steps.append(decoders.Strip(content=" ", left=1))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _byte_level(vocabulary: GgufVocabulary) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers

    pre = vocabulary.pre
    if pre not in PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"{vocabulary.path}: tokenizer.ggml.pre {pre!r} is not supported; supported: {', '.join(PRE_TOKENIZERS)}"
        )
    vocab = {token: index for index, token in enumerate(vocabulary.tokens)}
    model = _bpe(vocabulary, vocab=vocab, merges=_split_merges(vocabulary), ignore_merges=pre in _IGNORE_MERGES)
    tokenizer = Tokenizer(model)
    expression = PRE_TOKENIZERS[pre]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=expression is None)
    if pre == "smollm":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    elif expression is None:
        tokenizer.pre_tokenizer = byte_level
    else:
        split = pre_tokenizers.Split(Regex(expression), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    if expression == _QWEN2:
        tokenizer.normalizer = normalizers.NFC()  # as in Qwen's own tokenizer.json; GGUF does not record it
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def merges_from_scores(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """The merges that SentencePiece's BPE applies implicitly: every cut of a token into two tokens, best score first.

    Among equal scores a longer left part comes first, then a longer right part, then the lower id, which is the order
    that transformers gives converted tokenizers.
    """
    known = frozenset(tokens)
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(len(token) - 1, 0, -1):
            left = token[:cut]
            if left in known and (right := token[cut:]) in known:
                ranked.append((-score, -cut, -len(right), left, right))
    ranked.sort(key=lambda merge: merge[:3])  # stable: ties stay in the order of ids
    return [(left, right) for _, _, _, left, right in ranked]


def _split_merges(vocabulary: GgufVocabulary) -> list[tuple[str, str]]:
    merges = []
    for merge in vocabulary.merges or ():
        left, space, right = merge.partition(" ")
        if not (left and space and right) or " " in right:
            raise CheckpointError(
                f"{vocabulary.path}: tokenizer.ggml.merges holds {merge!r:.80}, expected two tokens and one space"
            )
        merges.append((left, right))
    return merges


def _bpe(vocabulary: GgufVocabulary, **options: Any) -> BPE:
    from tokenizers.models import BPE

    try:
        return BPE(**options)
    except Exception as error:  # the binding raises a bare Exception, such as for a merge outside the vocabulary
        raise CheckpointError(
            f"{vocabulary.path}: tokens and merges contradict each other ({one_line(error)}); convert the model again"
        ) from error


def _add_template(tokenizer: Tokenizer, vocabulary: GgufVocabulary) -> None:
    """Put BOS and EOS around each text, as the file's flags say."""
    from tokenizers.processors import TemplateProcessing

    wanted = [kind for kind, on in (("bos", vocabulary.add_bos), ("eos", vocabulary.add_eos)) if on]
    present = {kind: vocabulary.tokens[vocabulary.special[kind]] for kind in wanted if kind in vocabulary.special}

    def around(text: str, segment: int) -> list[str]:
        parts = [present.get("bos"), text, present.get("eos")]
        return [f"{part}:{segment}" for part in parts if part is not None]

    tokenizer.post_processor = TemplateProcessing(
        single=around("$A", 0),
        pair=around("$A", 0) + around("$B", 1),
        special_tokens=[(token, vocabulary.special[kind]) for kind, token in present.items()],
    )
