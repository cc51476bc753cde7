"""Tokenizers rebuilt from GGUF give the ids that the original and transformers give."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import gguf
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from llmc.compiler.checkpoint.gguf_reader import GgufReader
from llmc.compiler.checkpoint.gguf_tokenizer import (
    PRE_TOKENIZERS,
    build_tokenizer,
    merges_from_scores,
    write_gguf_tokenizer,
)
from llmc.compiler.checkpoint.gguf_vocabulary import read_vocabulary
from llmc.errors import CheckpointError, UnsupportedModelError
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers.tokenization_utils_base import generate_merges

TEXTS = [
    "",
    " ",
    "Hello, world! It's what they'd've said.",
    "  two leading and two trailing  ",
    "IT'S CAPS, it\u2019s curly",
    "中文分词测试：你好，世界！今天天气不错。",
    "日本語のテキストとカタカナ、ひらがな。",
    "مرحبا بالعالم، كيف حالك؟",
    "नमस्ते दुनिया, आप कैसे हैं?",
    "한국어 문장입니다.",
    "👨‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👍🏽 tone",
    "def f(x):\n\treturn x  # note\n\n\n    pass\t\t\n",
    "1234567890 3.14159 1,000,000 0x1F",
    "a" + " " * 70 + "b",
    "\n" * 40 + "end\r\n\r\n",
    "\t\t\t \t x",
    "a\u0000b\x80c\ufffd\ue000\u200b\u200d",
    "caf\u00e9 e\u0301 \ufb01 \u212b",
    "\u2581\u2581 literal \u2581marks",
    "𓀀 rare 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \U0010fffd",
    "<table><tr>x</td> <b>not special</b>",
    "<0x41> <s> </s> <unk>",
    "<bos>text<eos> <start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "[multimodal]<mask><pad><unused5>",
]
CORPUS = [*TEXTS, "the quick brown fox jumps over the lazy dog", "it's 2024, they'll see 12345 things"] * 3
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "<｜end｜>"]
RECENT = pytest.mark.skipif(
    tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 24),
    reason="older transformers read SentencePiece vocabularies from GGUF wrongly (prefix space, merge order)",
)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def vocabulary_of(tokenizer: Tokenizer, pre: str | None, **options: object) -> Callable[[gguf.GGUFWriter], None]:
    """Write a byte-level tokenizer's vocabulary the way llama.cpp's converter does."""
    model = json.loads(tokenizer.to_str())["model"]
    tokens = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]

    def write(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        if pre is not None:
            writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
        writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
        writer.add_eos_token_id(tokens.index("<|endoftext|>"))
        writer.add_bos_token_id(tokens.index("<s>"))
        for name, value in options.items():
            getattr(writer, name)(value)

    return write


def byte_level(split: pre_tokenizers.PreTokenizer | None, *, nfc: bool = False, ignore_merges: bool = False) -> Tokenizer:
    """Train a small original: its own cut of the text, 600 merges, special tokens at the end."""
    tokenizer = Tokenizer(BPE(ignore_merges=ignore_merges))
    byte = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    tokenizer.pre_tokenizer = byte if split is None else pre_tokenizers.Sequence([split, byte])
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False))
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def written(tiny, tmp_path: Path, vocabulary: Callable[[gguf.GGUFWriter], None], model_type: str = "llama") -> Path:
    file = tmp_path / "m.gguf"
    tiny.write_gguf(file, tiny.make_model(model_type, vocab_size=1200), vocabulary=vocabulary)
    write_gguf_tokenizer(GgufReader(file), tmp_path / "out")
    return tmp_path / "out"


@pytest.mark.parametrize(
    ("pre", "make"),
    [
        (None, lambda: byte_level(None)),
        ("gpt-2", lambda: byte_level(None)),
        ("smollm", lambda: smollm()),
        ("llama-bpe", lambda: byte_level(pre_tokenizers.Split(Regex(LLAMA3), "isolated"), ignore_merges=True)),
        (
            "qwen2",
            lambda: byte_level(pre_tokenizers.Split(Regex(LLAMA3.replace("{1,3}", "")), "isolated"), nfc=True),
        ),
    ],
)
def test_byte_level_ids_equal_the_originals(pre: str | None, make: Callable[[], Tokenizer], tiny, tmp_path: Path) -> None:
    original = make()
    out = written(tiny, tmp_path, vocabulary_of(original, pre, add_add_bos_token=False))
    found = Tokenizer.from_file(str(out / "tokenizer.json"))
    for text in TEXTS:
        ids = original.encode(text).ids
        assert found.encode(text).ids == ids, text
        assert found.decode(ids, skip_special_tokens=False) == original.decode(ids, skip_special_tokens=False)
        assert found.decode(ids) == original.decode(ids)


def smollm() -> Tokenizer:
    return byte_level(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), cut_gpt2()]))


def cut_gpt2() -> pre_tokenizers.PreTokenizer:
    expression = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    return pre_tokenizers.Split(Regex(expression), "isolated")


def test_the_qwen2_expression_is_transformers_own() -> None:
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    assert PRE_TOKENIZERS["qwen2"] == PRETOKENIZE_REGEX


def test_unknown_pre_tokenizer_lists_the_supported(tiny, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"'martian' is not supported; supported: default, gpt-2, smollm"):
        written(tiny, tmp_path, vocabulary_of(byte_level(None), "martian"))


@pytest.mark.parametrize(
    ("merges", "words"),
    [(["ab"], "expected two tokens and one space"), (["a b c"], "two tokens"), (["zz qq"], "contradict each other")],
)
def test_bad_merges(merges: list[str], words: str, tiny, tmp_path: Path) -> None:
    def write(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(["a", "b", "ab"])
        writer.add_token_merges(merges)

    with pytest.raises(CheckpointError, match=words):
        written(tiny, tmp_path, write)


def sentencepiece(**options: object) -> Callable[[gguf.GGUFWriter], None]:
    """A vocabulary in SentencePiece style: control, all 256 bytes, then pieces with falling scores."""
    pieces: dict[str, None] = {}
    trained = Tokenizer(BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(split=True)
    trained.train_from_iterator(CORPUS, BpeTrainer(vocab_size=500, show_progress=False))
    pieces = dict.fromkeys(sorted(trained.get_vocab(), key=lambda piece: (-len(piece), piece), reverse=True))
    for special in ("<unk>", "<s>", "</s>", "<|im_end|>", "\n\n"):
        pieces.pop(special, None)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "<|im_end|>", "\n\n"]

    def write(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores([-float(index // 2) for index in range(len(tokens))])  # with ties
        writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * len(pieces), 3, 4])
        writer.add_unk_token_id(0)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        for name, value in options.items():
            getattr(writer, name)(value)

    return write


@RECENT
def test_sentencepiece_ids_equal_transformers(tiny, tmp_path: Path) -> None:
    out = written(tiny, tmp_path, sentencepiece(add_add_bos_token=True))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    found = Tokenizer.from_file(str(out / "tokenizer.json"))
    reloaded = transformers.AutoTokenizer.from_pretrained(out)
    for text in TEXTS:
        ids = [1, *theirs(text, add_special_tokens=False)["input_ids"]]
        assert found.encode(text).ids == ids == reloaded(text)["input_ids"], text
        assert found.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_no_space_prefix(tiny, tmp_path: Path) -> None:
    out = written(tiny, tmp_path, sentencepiece(add_add_space_prefix=False))
    found = Tokenizer.from_file(str(out / "tokenizer.json"))
    assert found.encode("hello").tokens[1] != "\u2581"
    for text in ("hello world", " hello", "中文"):
        assert found.decode(found.encode(text).ids) == text


@pytest.mark.parametrize(("bos", "eos"), [(True, True), (False, True), (True, False), (False, False)])
def test_bos_and_eos_follow_the_flags(bos: bool, eos: bool, tiny, tmp_path: Path) -> None:
    out = written(tiny, tmp_path, sentencepiece(add_add_bos_token=bos, add_add_eos_token=eos))
    found = Tokenizer.from_file(str(out / "tokenizer.json"))
    assert found.encode("").ids == [1] * bos + [2] * eos
    assert found.encode("", "").ids == ([1] * bos + [2] * eos) * 2
    assert found.encode("a", add_special_tokens=False).ids == found.encode("a").ids[bos:][: -1 if eos else None]


def test_companion_files(tiny, tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    out = written(tiny, tmp_path, sentencepiece(add_chat_template=template))
    assert (out / "chat_template.jinja").read_text() == template
    assert json.loads((out / "tokenizer_config.json").read_text()) == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 128,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    before = (out / "tokenizer.json").read_bytes()
    write_gguf_tokenizer(GgufReader(tmp_path / "m.gguf"), out)
    assert (out / "tokenizer.json").read_bytes() == before
    assert transformers.AutoTokenizer.from_pretrained(out).chat_template == template


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.text(alphabet="abc\u2581", min_size=1, max_size=5), min_size=1, max_size=30, unique=True),
    st.data(),
)
def test_merges_are_transformers_merges(tokens: list[str], data: st.DataObject) -> None:
    scores = data.draw(st.lists(st.sampled_from([0.0, -1.0, -2.5]), min_size=len(tokens), max_size=len(tokens)))
    expected = generate_merges({token: i for i, token in enumerate(tokens)}, dict(zip(tokens, scores, strict=True)))
    assert merges_from_scores(tokens, scores) == expected


def greedy(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's BPE as published: merge the adjacent pair that makes the best-scored token, leftmost first."""
    pieces = list(text.replace(" ", "\u2581"))
    while True:
        pairs = [(scores.get(a + b, float("-inf")), -at) for at, (a, b) in enumerate(pairwise(pieces))]
        best, at = max(pairs, default=(float("-inf"), 0))
        if best == float("-inf"):
            return pieces
        pieces[-at : -at + 2] = [pieces[-at] + pieces[-at + 1]]


@pytest.mark.gemma
def test_gemma_pieces_are_those_of_sentencepiece(gemma_gguf: Path, tmp_path: Path) -> None:
    vocabulary = read_vocabulary(GgufReader(gemma_gguf))
    scored = zip(vocabulary.tokens, vocabulary.scores, vocabulary.kinds, strict=True)
    scores = {token: score for token, score, kind in scored if kind == 1}
    tokenizer = build_tokenizer(vocabulary)
    for text in TEXTS:
        if not any(mark in text for mark in ("  ", "\n", "\t", "<", "[", "\u0000", "\ue000", "\u2581", "\U0010fffd")):
            pieces = [piece for piece in greedy(text, scores) if piece in scores]  # the rest falls back to bytes
            found = tokenizer.encode(text, add_special_tokens=False).tokens
            assert [piece for piece in found if not re.fullmatch(r"<0x[0-9A-F]{2}>", piece)] == pieces


@pytest.mark.gemma
@pytest.mark.slow
@RECENT
def test_gemma_tokenizer_is_transformers_own(gemma_gguf: Path, tmp_path: Path) -> None:
    write_gguf_tokenizer(GgufReader(gemma_gguf), tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(gemma_gguf.parent, gguf_file=gemma_gguf.name)
    found = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in TEXTS:
        ids = [2, *theirs(text, add_special_tokens=False)["input_ids"]]
        assert found.encode(text).ids == ids, text
        assert found.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
        assert found.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    ours, original = (json.loads(tokenizer.to_str()) for tokenizer in (found, theirs.backend_tokenizer))
    for part in ("model", "normalizer", "pre_tokenizer", "decoder"):
        assert ours[part] == original[part], part
    assert found.encode("<start_of_turn>user\n").ids == [2, 105, 2364, 107]
    assert not (tmp_path / "chat_template.jinja").exists()
