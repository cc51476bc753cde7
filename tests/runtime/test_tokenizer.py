"""Encoding with exactly one beginning-of-sequence token, and incremental decoding that never takes text back."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llmc.errors import RequestError
from llmc.runtime.detokenizer import Detokenizer
from llmc.runtime.tokenizer import Tokenizer
from llmc.runtime.tokenizer_library import WholeTokenizer
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers, processors

CONFIG = {"bos_token": "<bos>", "eos_token": {"content": "<eos>", "lstrip": False}}
FIXTURE = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def make(library: Library, **config: object) -> Tokenizer:
    return Tokenizer(WholeTokenizer(library.to_str().encode(), "tokenizer.json"), {**CONFIG, **config})


@pytest.fixture
def byte_level(toy_tokenizer: Library) -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen."""
    return make(toy_tokenizer)


@pytest.fixture
def byte_fallback() -> Tokenizer:
    """As Gemma and Llama 2: words with a marker for the space, single bytes for the rest, a stripped first space."""
    words = ["<unk>", "<bos>", "<eos>", "▁", "▁a", "a", "b", "▁é", "�", "\n", "é", "▁▁", "🦊"]
    tokens = words + [f"<0x{byte:02X}>" for byte in range(256)] + [""]
    vocab = {token: index for index, token in enumerate(tokens)}
    library = Library(models.BPE(vocab, [("▁", "a")], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    library.normalizer = normalizers.Replace(" ", "▁")
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.add_special_tokens(["<bos>", "<eos>"])
    return make(library)


def pieces(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.finish()]


@FIXTURE
@given(token_ids=st.lists(st.integers(0, 299), max_size=40))
def test_pieces_join_to_the_whole_byte_level(byte_level: Tokenizer, token_ids: list[int]) -> None:
    assert "".join(pieces(byte_level, token_ids)) == byte_level.decode(token_ids)


@FIXTURE
@given(
    token_ids=st.lists(
        st.one_of(
            st.integers(0, 12),
            st.sampled_from([269, 400]),
            st.integers(0, 268),
            st.sampled_from([13 + 0xC3, 13 + 0xA9, 13 + 0x41]),
        ),
        max_size=30,
    )
)
def test_pieces_join_to_the_whole_byte_fallback(byte_fallback: Tokenizer, token_ids: list[int]) -> None:
    assert "".join(pieces(byte_fallback, token_ids)) == byte_fallback.decode(token_ids)


@FIXTURE
@given(text=st.text(max_size=30))
def test_valid_text_is_never_shown_as_replacement_characters(byte_level: Tokenizer, text: str) -> None:
    shown = pieces(byte_level, byte_level.encode(text, add_special_tokens=False))
    assert "".join(shown) == text
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in shown)


def test_a_character_is_shown_when_its_last_byte_has_come(byte_level: Tokenizer) -> None:
    fox = byte_level.encode("🦊", add_special_tokens=False)
    if len(fox) == 1:
        fox = byte_level.encode("🐙", add_special_tokens=False)
    assert len(fox) > 1
    shown = pieces(byte_level, fox)
    assert shown[:-2] == [""] * (len(fox) - 1)
    assert shown[-2:] == [byte_level.decode(fox), ""]


def test_text_is_shown_at_once(byte_level: Tokenizer) -> None:
    """Exactness alone would allow to withhold everything."""
    token_ids = byte_level.encode("the quick brown fox jumps", add_special_tokens=False)
    assert all(pieces(byte_level, token_ids)[:-1])


@pytest.mark.parametrize("text", ["the fox", "<bos>the fox", "<bos><bos>the fox", "<bos>", ""])
def test_bos_comes_exactly_once(byte_level: Tokenizer, text: str) -> None:
    token_ids = byte_level.encode(text)
    assert token_ids.count(0) == 1
    assert token_ids[0] == 0
    rest = byte_level.encode(text.replace("<bos>", ""), add_special_tokens=False)
    assert token_ids[1:] == rest


def test_bos_within_the_text_is_kept(byte_level: Tokenizer) -> None:
    assert byte_level.encode("a<bos>b").count(0) == 2


def test_bos_follows_the_post_processor_and_the_config(toy_tokenizer: Library) -> None:
    plain = Library.from_str(toy_tokenizer.to_str())
    plain.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    assert make(plain).encode("the")[0] != 0
    assert make(plain, add_bos_token=True).encode("the")[0] == 0
    assert make(plain, add_bos_token=True).encode("the", add_special_tokens=False)[0] != 0


def test_special_tokens(byte_level: Tokenizer) -> None:
    assert (byte_level.bos_id, byte_level.eos_id, byte_level.token_id("<turn>")) == (0, 1, 2)
    assert byte_level.token_id("<nothing>") is None
    assert byte_level.decode([0, *byte_level.encode("the", add_special_tokens=False), 1]) == "the"


def test_truncation_and_padding_of_the_file_are_not_applied(toy_tokenizer: Library) -> None:
    library = Library.from_str(toy_tokenizer.to_str())
    library.enable_truncation(4)
    library.enable_padding(length=64, pad_token="<eos>", pad_id=1)
    tokenizer = make(library)
    assert json.loads(library.to_str())["truncation"]["max_length"] == 4
    assert tokenizer.encode("the quick brown fox") == make(toy_tokenizer).encode("the quick brown fox")


def test_text_that_is_not_unicode(byte_level: Tokenizer) -> None:
    with pytest.raises(RequestError, match="not valid Unicode"):
        byte_level.encode("a\ud800")
