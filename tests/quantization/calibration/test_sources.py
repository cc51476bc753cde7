"""Reading calibration files: each malformed one is one sentence with the file and the line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llmc.quantization.calibration import CalibrationError, load_calibration
from llmc.quantization.calibration import sources as sources_module
from llmc.quantization.calibration.encoder import pack
from llmc.quantization.calibration.sources import Source, read_source


def read(path: Path, max_records: int = 100, max_text_bytes: int = 1 << 20) -> Source:
    return read_source(path, max_records=max_records, max_text_bytes=max_text_bytes)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b'{"text": "a"}\n{"text": \n', r"x.jsonl:2: not JSON \(.*\); expected one of"),
        (b'{"text": "a"}\n\n["a"]\n', r'x.jsonl:3: \["a"\] is no JSON object; expected one of'),
        (b'{"prompt": "a"}\n', r"x.jsonl:1: found the keys prompt; expected one of"),
        (b"{}\n", r"x.jsonl:1: found the keys of an empty object; expected"),
        (b'{"text": "a", "token_ids": [1]}\n', r"x.jsonl:1: found both text and token_ids; expected one of"),
        (b'{"text": 5}\n', r"x.jsonl:1: text is 5; expected a string"),
        (b'{"text": "\\ud800"}\n', r"x.jsonl:1: text holds half a surrogate pair"),
        (b'{"token_ids": "1 2"}\n', r"x.jsonl:1: token_ids is '1 2'; expected a list"),
        (b'{"token_ids": [1, 2.5]}\n', r"x.jsonl:1: token_ids\[1\] is 2.5; expected a whole number"),
        (b'{"token_ids": [true]}\n', r"x.jsonl:1: token_ids\[0\] is True; expected a whole number"),
        (b'{"messages": []}\n', r"x.jsonl:1: messages is empty"),
        (b'{"messages": [{"role": "user"}]}\n', r"x.jsonl:1: messages\[0\].content is None; expected text"),
        (b'{"messages": {"role": "user"}}\n', r"x.jsonl:1: messages is .*; expected a list"),
        (b'{"text": "a"}\n{"text": "\xff"}\n', r"x.jsonl:2: not UTF-8 text \(byte 0xff at column 11\); convert the file"),
        (b"[" * 100_000, r"x.jsonl:1: not JSON \(.*recursion.*\); expected"),
    ],
)
def test_malformed_lines(content: bytes, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    with pytest.raises(CalibrationError, match=sentence) as caught:
        read(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500 + len(str(path))


@pytest.mark.parametrize(
    ("content", "found"),
    [(b"", "an empty file"), (b"\n \n", "nothing but white space"), (b'{"text": " "}\n', "1 blank records")],
)
def test_empty_files(content: bytes, found: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    with pytest.raises(CalibrationError, match=f"x.jsonl: empty: found {found}"):
        load_calibration(path, None, vocab_size=10)


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="a folder; expected a JSONL file"):
        read(tmp_path)
    with pytest.raises(CalibrationError, match=r"absent.txt: no such file; expected"):
        read(tmp_path / "absent.txt")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CalibrationError, match="pipe: no regular file; expected"):
        read(tmp_path / "pipe")


def test_a_line_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources_module, "MAX_LINE_BYTES", 1 << 20)
    (tmp_path / "x.txt").write_bytes(b"short\n" + b"a" * (1 << 21))
    with pytest.raises(CalibrationError, match=r"x.txt:2: a line of more than 1 MiB; break it up"):
        read(tmp_path / "x.txt")


def test_jsonl_is_recognised_by_its_first_line_or_its_name(tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text('\n{"text": "a"}\n{"text": "b"}\n')
    assert [record.text for record in read(tmp_path / "data.txt").records] == ["a", "b"]
    (tmp_path / "notes.txt").write_text('{"other": 1}\n{not json}\n')
    assert read(tmp_path / "notes.txt").is_plain_text
    (tmp_path / "data.NDJSON").write_text("no JSON")
    with pytest.raises(CalibrationError, match="not JSON"):
        read(tmp_path / "data.NDJSON")


def test_paragraphs_know_their_lines(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("one\n  indented\n\n\ntwo\n   \nthree")
    records = read(tmp_path / "x.txt").records
    assert [(record.where.rpartition(":")[2], record.text) for record in records] == [
        ("1", "one\n  indented"),
        ("5", "two"),
        ("7", "three"),
    ]


@given(st.lists(st.lists(st.integers(2, 9), max_size=40), max_size=20), st.integers(2, 30), st.booleans())
def test_packing_keeps_every_token_in_order(paragraphs: list[list[int]], max_length: int, bos: bool) -> None:
    prefix = [1] if bos else []
    samples = pack(paragraphs, prefix, max_length)
    assert [token for sample in samples for token in sample[len(prefix) :]] == [token for p in paragraphs for token in p]
    assert all(sample[: len(prefix)] == prefix and len(prefix) < len(sample) <= max_length for sample in samples)
    room = max_length - len(prefix)
    assert all(2 * (len(sample) - len(prefix)) >= room for sample in samples[:-1])


@given(
    st.one_of(st.binary(max_size=200), st.text(max_size=80).map(lambda text: text.encode("utf-8", "surrogatepass"))),
    st.booleans(),
)
def test_any_bytes_are_read_or_refused_in_one_sentence(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, jsonl: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / ("any.jsonl" if jsonl else "any.txt")
    path.write_bytes(content)
    sentence, source = "", None
    try:
        source = read(path)
    except CalibrationError as error:
        sentence = str(error)
    if source is None:
        assert sentence.startswith(str(path))
        assert len(sentence.splitlines()) == 1
    else:
        assert source.bytes_read == len(content)
        assert all((record.text or "x").strip() for record in source.records)
