"""From a calibration file, the built-in texts or nothing at all to samples of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ...errors import UsageError
from . import detectors
from .builtin import builtin_texts, paragraphs_of
from .calibration import Calibration, CalibrationError, CalibrationWarning
from .encoder import SampleEncoder, pack
from .sources import Record, Source, read_source

READ_AHEAD = 4  # times the samples asked for are read of a file, and chosen from at random
_BYTES_PER_TOKEN = 8  # of plain text, generously
_MIN_BUILTIN_LENGTH = 64  # tokens; the built-in texts are cut finer for more samples, but not below

_T = TypeVar("_T")


def load_calibration(
    source: str | Path | None,
    tokenizer_folder: Path | None,
    *,
    vocab_size: int,
    num_samples: int = 128,
    max_length: int = 512,
    seed: int = 0,
) -> Calibration:
    """Up to `num_samples` samples of at most `max_length` ids below `vocab_size`; the same for the same input and seed.

    `source` is a JSONL file whose lines are chats, texts or token ids, in any mixture, or a UTF-8 text. Chats are rendered by the model's
    chat template, texts begin with the token that the tokenizer puts there, and a plain text's paragraphs are packed into samples. Without
    a source the built-in texts are used, or random ids if there is no tokenizer. `tokenizer_folder` holds what
    `Checkpoint.write_tokenizer` wrote.

    Raises CalibrationError for a file that is absent, empty or malformed, with its line; UsageError for numbers out of range.
    """
    for name, value, least in (("num_samples", num_samples, 1), ("max_length", max_length, 2), ("vocab_size", vocab_size, 1)):
        if value < least:
            raise UsageError(f"calibration: {name}={value}; expected at least {least}")
    if source is not None:
        return _from_file(Path(source), SampleEncoder(tokenizer_folder, vocab_size), num_samples, max_length, seed)
    if tokenizer_folder is not None:
        return _from_builtin(SampleEncoder(tokenizer_folder, vocab_size), num_samples, max_length, seed)
    generator = np.random.default_rng(seed)
    samples = list(generator.integers(0, vocab_size, (num_samples, max_length), dtype=np.int64))
    return Calibration(
        samples=samples,
        source="random tokens",
        warnings=_present(detectors.random_tokens(num_samples), detectors.few_samples(num_samples)),
    )


def _from_file(path: Path, encoder: SampleEncoder, num_samples: int, max_length: int, seed: int) -> Calibration:
    read = read_source(
        path, max_records=READ_AHEAD * num_samples, max_text_bytes=READ_AHEAD * _BYTES_PER_TOKEN * num_samples * max_length
    )
    if not read.records:
        found = (
            f"{read.num_blank} blank records"
            if read.num_blank
            else "an empty file"
            if not read.size
            else "nothing but white space"
        )
        raise CalibrationError(f"{path}: empty: found {found}; expected chats, texts or token ids to calibrate with")
    if read.is_plain_text:
        paragraphs = [encoder.encode_paragraph(record.text or "", record.where) for record in read.records]
        samples = [encoder.single_bos(ids) for ids in _chosen(pack(paragraphs, encoder.prefix, max_length), num_samples, seed)]
        used, num_cut = read.records, 0
    else:
        used = _chosen(read.records, num_samples, seed)
        samples, num_cut = _encode_records(used, encoder, num_samples, max_length)
    arrays = _as_arrays(samples, encoder, path)
    return Calibration(
        samples=arrays, source=str(path), warnings=_doubts(arrays, used, read, encoder, path, num_cut, max_length)
    )


def _encode_records(
    records: Sequence[Record], encoder: SampleEncoder, num_samples: int, max_length: int
) -> tuple[list[list[int]], int]:
    """A sample of each record, and of the rest of long texts where there are too few; and how many records lost tokens."""
    samples: list[list[int]] = []
    rests: list[list[int]] = []
    num_cut = 0
    for record in records:
        ids = encoder.encode(record)
        samples.append(ids[:max_length])
        if len(ids) > max_length:
            if record.text is None:
                num_cut += 1
            else:
                rests.append(ids[max_length:])
    for rest in rests:
        pieces = pack([rest], encoder.prefix, max_length)
        wanted = pieces[: num_samples - len(samples)]
        samples += wanted
        num_cut += len(wanted) < len(pieces)
    return samples, num_cut


def _doubts(
    samples: list[npt.NDArray[np.int64]],
    used: Sequence[Record],
    read: Source,
    encoder: SampleEncoder,
    path: Path,
    num_cut: int,
    max_length: int,
) -> tuple[CalibrationWarning, ...]:
    total = len(samples)
    tokenizer = encoder.tokenizer
    language = unknown = None
    if tokenizer is not None:
        language = detectors.wrong_language((text for record in used for text in record.texts()), tokenizer)
        unknown = detectors.unknown_tokens(samples, tokenizer.token_id(tokenizer.special_tokens.get("unk_token")))
    return _present(
        detectors.few_samples(total),
        detectors.short_samples(samples, max_length),
        detectors.repeated(samples),
        language or unknown,
        detectors.double_bos(encoder.num_double_bos, total),
        detectors.no_bos(encoder.num_no_bos, total),
        detectors.truncated(num_cut, total, max_length),
        detectors.blank_records(read.num_blank, read.num_blank + len(read.records)),
        detectors.partly_read(str(path), len(read.records), read.bytes_read, read.size),
    )


def _from_builtin(encoder: SampleEncoder, num_samples: int, max_length: int, seed: int) -> Calibration:
    """Samples of every built-in text in proportion to its length, cut finer than `max_length` if that gives the number asked for."""
    texts = {
        name: [encoder.encode_paragraph(paragraph, name) for paragraph in paragraphs_of(text)]
        for name, text in builtin_texts().items()
    }
    num_tokens = sum(len(paragraph) for paragraphs in texts.values() for paragraph in paragraphs)
    length = min(max_length, max(_MIN_BUILTIN_LENGTH, num_tokens // num_samples))
    while True:
        pieces = (piece for paragraphs in texts.values() for piece in pack(paragraphs, encoder.prefix, length))
        samples = [piece for piece in pieces if 4 * len(piece) >= length]  # not the last few words of a text
        if len(samples) >= num_samples or length <= _MIN_BUILTIN_LENGTH:
            break
        length = max(_MIN_BUILTIN_LENGTH, length * 7 // 8)  # packing left the end of some samples empty
    arrays = _as_arrays(_chosen(samples, num_samples, seed), encoder, Path("built-in texts"))
    warnings = _present(detectors.builtin(), detectors.few_samples(len(arrays)))
    return Calibration(samples=arrays, source="built-in texts", warnings=warnings)


def _as_arrays(samples: Sequence[Sequence[int]], encoder: SampleEncoder, path: Path) -> list[npt.NDArray[np.int64]]:
    arrays = [np.array(sample, dtype=np.int64) for sample in samples]
    highest = max((int(array.max()) for array in arrays if array.size), default=0)
    if highest >= encoder.vocab_size:
        raise CalibrationError(
            f"{path}: the tokenizer gives id {highest}, but the model's are from 0 to {encoder.vocab_size - 1}; "
            "check that tokenizer and model belong together"
        )
    return arrays


def _chosen(items: Sequence[_T], count: int, seed: int) -> list[_T]:
    """`count` of the items at random, in their order."""
    if len(items) <= count:
        return list(items)
    return [items[index] for index in sorted(np.random.default_rng(seed).permutation(len(items))[:count])]


def _present(*warnings: CalibrationWarning | None) -> tuple[CalibrationWarning, ...]:
    return tuple(warning for warning in warnings if warning is not None)
