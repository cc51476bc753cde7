"""Calibration samples: chats, texts and ids from files, the built-in texts, random ids; the same each time, `<s>` exactly once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from llmc.errors import CheckpointError, UsageError
from llmc.quantization.calibration import Calibration, CalibrationError, load_calibration
from llmc.runtime.tokenizer import Tokenizer
from llmc.runtime.tokenizer_library import WholeTokenizer

BOS = 1
VOCAB_SIZE = 600
CHAT = [{"role": "user", "content": "Why is the sea salt?"}, {"role": "assistant", "content": "Rivers carry it there."}]


def tokenizer_of(folder: Path) -> Tokenizer:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    return Tokenizer(WholeTokenizer((folder / "tokenizer.json").read_bytes(), "tokenizer.json"), config)


def load(source: Path | None, folder: Path | None, **options: int) -> Calibration:
    return load_calibration(source, folder, vocab_size=VOCAB_SIZE, **options)


def names(calibration: Calibration) -> set[str]:
    return {warning.name for warning in calibration.warnings}


def jsonl(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_chats_texts_and_ids_in_one_file(tokenizer_folder: Path, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tokenizer_folder)
    source = jsonl(
        tmp_path / "mixed.jsonl",
        {"messages": CHAT, "id": 7},
        {"text": "A short text."},
        {"token_ids": [BOS, 5, 6]},
        {"messages": CHAT[:1]},
    )
    calibration = load(source, tokenizer_folder)
    chat, text, ids, open_chat = (sample.tolist() for sample in calibration.samples)
    rendered = "user: Why is the sea salt?</s>assistant: Rivers carry it there.</s>"
    assert chat == [BOS, *tokenizer.encode(rendered, add_special_tokens=False)]
    assert text == [BOS, *tokenizer.encode("A short text.", add_special_tokens=False)]
    assert ids == [BOS, 5, 6]
    assert tokenizer.decode(open_chat).endswith("assistant:")  # the model's answer would begin here
    assert all(sample.dtype == np.int64 for sample in calibration.samples)
    assert calibration.num_tokens == sum(map(len, (chat, text, ids, open_chat)))
    assert calibration.source == str(source)
    assert names(calibration) == {"few-samples", "short-samples"}


def test_a_plain_text_is_packed_without_loss(tokenizer_folder: Path, tmp_path: Path) -> None:
    paragraphs = [f"Paragraph {i} says that {i} and {i + 1} make {2 * i + 1}. " * (1 + i % 5) for i in range(60)]
    (tmp_path / "book.txt").write_bytes(("\ufeff" + "\r\n \r\n".join(p.strip() for p in paragraphs)).encode())
    calibration = load(tmp_path / "book.txt", tokenizer_folder, max_length=100)
    assert all(sample[0] == BOS and BOS not in sample[1:] for sample in calibration.samples)
    assert all(len(sample) <= 100 for sample in calibration.samples)
    assert np.mean([len(sample) for sample in calibration.samples]) > 70
    joined = [token for sample in calibration.samples for token in sample[1:].tolist()]
    assert tokenizer_of(tokenizer_folder).decode(joined).split() == " ".join(paragraphs).split()
    assert "few-samples" in names(calibration)
    assert "truncated" not in names(calibration)


def test_long_texts_fill_up_the_samples(tokenizer_folder: Path, tmp_path: Path) -> None:
    words = " ".join(f"word{i}" for i in range(900))
    source = jsonl(tmp_path / "long.jsonl", {"text": words}, {"text": "short"})
    calibration = load(source, tokenizer_folder, max_length=64, num_samples=8)
    assert [len(sample) for i, sample in enumerate(calibration.samples) if i != 1] == [64] * 7
    assert all(sample[0] == BOS for sample in calibration.samples)
    assert "1 of 8 samples are longer than 64 tokens" in next(w.text for w in calibration.warnings if w.name == "truncated")
    whole = load(source, tokenizer_folder, max_length=64, num_samples=200)
    assert "truncated" not in names(whole)
    joined = [token for i, sample in enumerate(whole.samples) if i != 1 for token in sample[1:].tolist()]
    assert tokenizer_of(tokenizer_folder).decode(joined) == words


def test_chats_that_are_too_long_are_cut(tokenizer_folder: Path, tmp_path: Path) -> None:
    source = jsonl(tmp_path / "chats.jsonl", {"messages": [{"role": "user", "content": "again and again " * 50}]})
    calibration = load(source, tokenizer_folder, max_length=16)
    assert [len(sample) for sample in calibration.samples] == [16]
    assert "truncated" in names(calibration)


@pytest.mark.parametrize(
    ("record", "warning"),
    [
        ({"text": "<s>A text."}, "double-bos"),
        ({"token_ids": [BOS, BOS, 5, 6]}, "double-bos"),
        ({"token_ids": [5, 6]}, "no-bos"),
        ({"token_ids": [BOS, 5, 6]}, None),
        ({"text": "A text."}, None),
    ],
)
def test_the_token_that_begins_a_text(record: object, warning: str | None, tokenizer_folder: Path, tmp_path: Path) -> None:
    calibration = load(jsonl(tmp_path / "one.jsonl", record), tokenizer_folder)
    ids = calibration.samples[0].tolist()
    assert ids.count(BOS) == (warning != "no-bos")
    assert names(calibration) & {"double-bos", "no-bos"} == ({warning} if warning else set())


def test_a_template_that_doubles_it(make_tokenizer: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_tokenizer(template="{{ bos_token }}{% for m in messages %}{{ bos_token }}{{ m.content }}{% endfor %}")
    calibration = load(jsonl(tmp_path / "one.jsonl", {"messages": CHAT[:1]}), folder)
    assert calibration.samples[0].tolist().count(BOS) == 1
    assert "double-bos" in names(calibration)


def test_a_plain_text_that_spells_it(tokenizer_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("<s>A text that was saved with its special tokens.")
    calibration = load(tmp_path / "text.txt", tokenizer_folder)
    assert calibration.samples[0].tolist().count(BOS) == 1
    assert "double-bos" in names(calibration)


def test_a_model_without_it(make_tokenizer: Callable[..., Path], tmp_path: Path) -> None:
    source = jsonl(tmp_path / "mixed.jsonl", {"text": "A text."}, {"token_ids": [5, 6]})
    calibration = load(source, make_tokenizer(bos=False))
    assert all(BOS not in sample for sample in calibration.samples)
    assert not names(calibration) & {"double-bos", "no-bos"}


def test_the_same_input_gives_the_same_samples(tokenizer_folder: Path, tmp_path: Path) -> None:
    source = jsonl(tmp_path / "many.jsonl", *({"token_ids": [BOS, i, i + 1]} for i in range(2, 42)))
    first = load(source, tokenizer_folder, num_samples=10)
    assert first.digest == load(source, tokenizer_folder, num_samples=10).digest
    assert len(first.samples) == 10
    assert first.digest != load(source, tokenizer_folder, num_samples=10, seed=1).digest
    order = [int(sample[1]) for sample in first.samples]
    assert order == sorted(order)
    assert order != list(range(2, 12))  # not merely the first lines


def test_the_digest_sees_where_samples_end() -> None:
    ids = np.arange(6)
    assert (
        Calibration(samples=[ids[:2], ids[2:]], source="").digest != Calibration(samples=[ids[:3], ids[3:]], source="").digest
    )


def test_a_large_file_is_read_in_part(tokenizer_folder: Path, tmp_path: Path) -> None:
    source = jsonl(tmp_path / "many.jsonl", *({"token_ids": [BOS, i]} for i in range(2, 102)))
    with source.open("a") as file:
        file.write("never read, or this would be an error\n")
    calibration = load(source, tokenizer_folder, num_samples=5)
    (warning,) = (warning for warning in calibration.warnings if warning.name == "partly-read")
    assert "(20 records)" in warning.text
    (tmp_path / "one_line.txt").write_text("no line ends here " * 20000)
    calibration = load(tmp_path / "one_line.txt", tokenizer_folder, num_samples=2, max_length=32)
    assert "partly-read" not in names(calibration)  # a line is read whole
    (tmp_path / "lines.txt").write_text("one of many lines\n" * 20000)
    assert {"partly-read", "repeated"} <= names(load(tmp_path / "lines.txt", tokenizer_folder, num_samples=8, max_length=32))


def test_bad_data_is_named(tokenizer_folder: Path, tmp_path: Path) -> None:
    same = jsonl(tmp_path / "same.jsonl", *({"text": "Buy now."} for _ in range(200)))
    assert names(load(same, tokenizer_folder)) == {"repeated", "short-samples"}
    russian = tmp_path / "russian.txt"
    russian.write_text("Все счастливые семьи похожи друг на друга, каждая несчастливая семья несчастлива по-своему.")
    assert "wrong-language" in names(load(russian, tokenizer_folder))
    blank = jsonl(tmp_path / "blank.jsonl", {"text": " \n"}, {"token_ids": []}, {"text": "not blank"})
    assert "2 of 3 records" in next(w.text for w in load(blank, tokenizer_folder).warnings if w.name == "blank-records")


def test_the_built_in_texts(tokenizer_folder: Path) -> None:
    calibration = load(None, tokenizer_folder)
    assert len(calibration.samples) == 128
    assert names(calibration) == {"builtin"}
    assert all(sample[0] == BOS and 32 < len(sample) <= 512 for sample in calibration.samples)
    assert len({sample.tobytes() for sample in calibration.samples}) == 128
    assert calibration.digest == load(None, tokenizer_folder).digest
    short = load(None, tokenizer_folder, max_length=100, num_samples=16)
    assert len(short.samples) == 16
    assert max(map(len, short.samples)) <= 100
    assert names(short) == {"builtin", "few-samples"}


def test_random_ids_without_a_tokenizer() -> None:
    calibration = load(None, None, num_samples=3, max_length=40)
    assert [sample.shape for sample in calibration.samples] == [(40,)] * 3
    assert all(0 <= token < VOCAB_SIZE for sample in calibration.samples for token in sample)
    assert len(np.unique(calibration.samples)) > 80
    assert names(calibration) == {"random-tokens", "few-samples"}
    assert calibration.digest == load(None, None, num_samples=3, max_length=40).digest
    assert calibration.digest != load(None, None, num_samples=3, max_length=40, seed=1).digest


def test_what_the_model_cannot_read(make_tokenizer: Callable[..., Path], tmp_path: Path) -> None:
    ids = jsonl(tmp_path / "ids.jsonl", {"token_ids": [BOS, 5]}, {"token_ids": [BOS, VOCAB_SIZE]})
    with pytest.raises(CalibrationError, match=r"ids.jsonl:2: token_ids\[1\] is 600; the model's ids are from 0 to 599"):
        load(ids, make_tokenizer())
    text = jsonl(tmp_path / "text.jsonl", {"token_ids": [5]}, {"text": "A text."})
    with pytest.raises(CalibrationError, match=r"text.jsonl:2: a text, but the model has no tokenizer"):
        load(text, None)
    (tmp_path / "plain.txt").write_text("A text.")
    with pytest.raises(CalibrationError, match=r"plain.txt:1: a text, but the model has no tokenizer"):
        load(tmp_path / "plain.txt", None)
    chat = jsonl(tmp_path / "chat.jsonl", {"messages": CHAT})
    with pytest.raises(CalibrationError, match=r"chat.jsonl:1: a chat, but the model has no chat template"):
        load(chat, make_tokenizer(template=None))
    with pytest.raises(CalibrationError, match=r"chat.jsonl:1: the chat template refused the messages: no"):
        load(chat, make_tokenizer(template="{{ raise_exception('no') }}"))
    with pytest.raises(
        CalibrationError, match=r"built-in texts: the tokenizer gives id \d+, but the model's are from 0 to 299"
    ):
        load_calibration(None, make_tokenizer(), vocab_size=300)
    with pytest.raises(CheckpointError, match=r"tokenizer.json: cannot be read"):
        load(chat, tmp_path)


@pytest.mark.parametrize("option", ["num_samples", "max_length"])
def test_numbers_out_of_range(option: str) -> None:
    with pytest.raises(UsageError, match=f"{option}=0; expected at least"):
        load(None, None, **{option: 0})
