"""A part of the vocabulary must encode and decode exactly as the whole does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import llmc
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from llmc.errors import BundleError
from llmc.runtime import SamplingParams, partial_tokenizer
from llmc.runtime.partial_tokenizer import PartialTokenizer
from llmc.runtime.tokenizer_index import INDEX_NAME, TokenizerIndex, build_index
from llmc.runtime.tokenizer_library import WholeTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TRAINING = [
    "the quick brown fox jumps over the lazy dog; naïve café, 你好世界, 🦊🦊 and   spaces\n\nlines\n" * 3,
    "aaaa aaab abab bbbb thethe foxfox " * 5,
]
texts = st.one_of(
    st.text(max_size=40),
    st.text("ab th\n▁fox.é好🦊<>", max_size=60),
    st.lists(st.sampled_from(["<bos>", "<turn>", "\n\n", "the ", " fox", "aaaa", "▁", "  ", "<0x41>", "ab"])).map("".join),
)


def train(tokenizer: Tokenizer, alphabet: list[str]) -> Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<bos>", "<turn>", "<unk>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TRAINING, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    tokenizer.add_tokens([AddedToken("\n\n", normalized=False), AddedToken("lazy", normalized=True)])
    tokenizer.add_special_tokens(["<extra>"])
    return tokenizer


def byte_level(*, ignore_merges: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return train(tokenizer, pre_tokenizers.ByteLevel.alphabet())


def byte_fallback(*, prepend: bool = False) -> Tokenizer:
    """With byte tokens for what the alphabet lacks; the words keep their spaces."""
    trained = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    trained.normalizer = normalizers.Sequence(steps) if prepend else steps[1]
    trained.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    data = json.loads(train(trained, []).to_str())
    vocab = data["model"]["vocab"]
    top = max([*vocab.values(), *(token["id"] for token in data["added_tokens"])])
    vocab.update({f"<0x{byte:02X}>": top + 1 + byte for byte in range(256)})
    data["model"]["byte_fallback"] = True
    return Tokenizer.from_str(json.dumps(data))


def unknown() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return train(tokenizer, [])


KINDS = {
    "byte-level": byte_level(),
    "ignore-merges": byte_level(ignore_merges=True),
    "byte-fallback": byte_fallback(),
    "prepend": byte_fallback(prepend=True),
    "unknown": unknown(),
}


def never() -> WholeTokenizer:
    raise AssertionError("the whole vocabulary was loaded")


def pair(tokenizer: Tokenizer) -> tuple[PartialTokenizer, WholeTokenizer]:
    data = tokenizer.to_str().encode()
    index = build_index(data)
    assert index is not None
    return PartialTokenizer(TokenizerIndex(index, Path("index")), never, "index"), WholeTokenizer(data, "whole")


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_encodes_as_the_whole(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_tokenizer, "MAX_CHARACTERS", 10**9)
    part, whole = pair(KINDS[kind])
    merged = 0

    @settings(max_examples=250, deadline=None)
    @given(text=texts, add=st.booleans())
    @example(text="the lazy dog\n\n<turn> the fox 🦊<extra>", add=True)
    def same(text: str, add: bool) -> None:
        nonlocal merged
        ids = whole.encode(text, add_special_tokens=add)
        assert part.encode(text, add_special_tokens=add) == ids
        merged += len(text.encode()) > len(ids)
        for skip in (True, False):
            assert part.decode(ids, skip_special_tokens=skip) == whole.decode(ids, skip_special_tokens=skip)

    same()
    assert merged > 50, "nearly no text was merged into longer tokens"


@pytest.mark.parametrize("kind", KINDS)
def test_every_token_is_known_to_both(kind: str) -> None:
    part, whole = pair(KINDS[kind])
    assert part.vocab_size == whole.vocab_size
    assert part.special_ids == whole.special_ids
    for token_id in range(-2, whole.vocab_size + 2):
        token = whole.token(token_id) if token_id >= 0 else None
        assert part.token(token_id) == token
        if token is not None:
            assert part.token_id(token) == whole.token_id(token)
    assert part.token_id("no such token") is None


@settings(max_examples=100, deadline=None)
@given(token_ids=st.lists(st.integers(0, 520), max_size=20), skip=st.booleans())
def test_a_part_decodes_as_the_whole(token_ids: list[int], skip: bool) -> None:
    for part, whole in (PAIRS["byte-level"], PAIRS["byte-fallback"]):
        assert part.decode(token_ids, skip_special_tokens=skip) == whole.decode(token_ids, skip_special_tokens=skip)


PAIRS = {kind: pair(tokenizer) for kind, tokenizer in KINDS.items()}


def test_much_text_loads_the_whole_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_tokenizer, "MAX_CHARACTERS", 20)
    data = KINDS["byte-level"].to_str().encode()
    calls = []

    def load_whole() -> WholeTokenizer:
        calls.append(1)
        return WholeTokenizer(data, "whole")

    part = PartialTokenizer(TokenizerIndex(build_index(data) or b"", Path("index")), load_whole, "index")
    whole = WholeTokenizer(data, "whole")
    for count, text in ((0, "the fox"), (0, "jumps over"), (1, "the lazy dog"), (1, "the fox")):
        assert part.encode(text, add_special_tokens=True) == whole.encode(text, add_special_tokens=True)
        assert len(calls) == count


def test_the_index_is_the_same_every_time() -> None:
    data = KINDS["byte-fallback"].to_str().encode()
    assert build_index(data) == build_index(data)


@pytest.mark.parametrize(
    "changes",
    [
        {"dropout": 0.1},
        {"continuing_subword_prefix": "##"},
        {"end_of_word_suffix": "</w>"},
        {"type": "Unigram"},
        {"byte_fallback": True, "vocab": {"<0x41>": 0, "a": 1, "<0x41>a": 2}, "merges": [["<0x41>", "a"]]},
        {"unk_token": "<u>", "vocab": {"<u>": 0, "a": 1, "<u>a": 2}, "merges": ["<u> a"]},
        {"vocab": {}, "merges": []},
        {"vocab": {"a": 0, "\ud800": 1}, "merges": []},
    ],
)
def test_vocabularies_that_need_the_whole(changes: dict[str, object]) -> None:
    data = json.loads(KINDS["byte-level"].to_str())
    data["model"].update(changes)
    assert build_index(json.dumps(data).encode()) is None


def test_merges_written_as_text_and_twice() -> None:
    vocab = {token: index for index, token in enumerate(["a", "b", "c", "ab", "bc"])}
    for merges in (["a b", "b c"], ["b c", "a b"], ["a b", "b c", "a b"]):
        data = json.loads(Tokenizer(models.BPE(vocab, [])).to_str())
        data["model"]["merges"] = merges
        part, whole = pair(Tokenizer.from_str(json.dumps(data)))
        assert part.encode("abc", add_special_tokens=False) == whole.encode("abc", add_special_tokens=False)


def test_an_engine_with_an_index(build_bundle: Callable[..., Path], toy_bundle: Path, tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    with llmc.load(toy_bundle) as engine:
        expected = engine.generate("the quick brown 🦊", params)
    bundle = build_bundle(tmp_path / "b", index=True)
    with llmc.load(bundle) as engine:
        output = engine.generate("the quick brown 🦊", params)
        assert (output.token_ids, output.text) == (expected.token_ids, expected.text)
        assert engine.tokenizer.encode("x" * 70_000)[:2] == [0, engine.tokenizer.token_id("x")]


def test_damaged_and_stale_indices(
    build_bundle: Callable[..., Path], tmp_path: Path, rewrite_manifest: Callable[..., None]
) -> None:
    bundle = build_bundle(tmp_path / "b", index=True)
    good = (bundle / INDEX_NAME).read_bytes()
    (bundle / INDEX_NAME).write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(BundleError, match=r"tokenizer_index\.safetensors: SHA-256 is"):
        llmc.load(bundle)
    (bundle / INDEX_NAME).write_bytes(good.replace(b'"ids"', b'"idz"'))
    rewrite_manifest(bundle)
    with pytest.raises(BundleError, match="expected a one-dimensional U32 tensor 'ids'"):
        llmc.load(bundle)
    (bundle / INDEX_NAME).write_bytes(good)
    (bundle / "tokenizer.json").write_bytes((bundle / "tokenizer.json").read_bytes() + b"\n")
    rewrite_manifest(bundle)
    with pytest.raises(BundleError, match=r"made from another tokenizer\.json"):
        llmc.load(bundle)
