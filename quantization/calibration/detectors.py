"""What can be wrong with calibration data: each detector returns a named warning, or None."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from ...runtime.tokenizer import Tokenizer
from .calibration import CalibrationWarning

MIN_SAMPLES = 128
TOKENS_PER_COLUMN = 4  # fewer leave the Hessian of a layer far from full rank
MIN_DISTINCT_SAMPLES = 0.5  # of all samples
NGRAM, MIN_DISTINCT_NGRAMS = 16, 0.25  # natural text has 0.9 and more, even where the tokens are single bytes
SHORT_SHARE = 0.125  # of the length that was asked for
MIN_SCRIPT_SHARE = 0.1  # of all letters, for a script to be judged
MAX_SCRIPT_COST, MAX_ASCII_COST = 0.55, 0.45  # tokens per UTF-8 byte; a token for each byte costs 1, well covered text 0.25
MAX_UNKNOWN = 0.01  # of all tokens
SURPRISE_RATIO, SURPRISE_NATS = 1.5, 1.0


def builtin() -> CalibrationWarning:
    """The built-in texts stand in for the user's traffic."""
    return CalibrationWarning(
        name="builtin",
        text="calibrated with the built-in texts; a few hundred samples of your own traffic (--calibration FILE) serve it better",
    )


def random_tokens(num_samples: int) -> CalibrationWarning:
    """There was nothing to calibrate with."""
    return CalibrationWarning(
        name="random-tokens",
        text=f"calibrated with {num_samples} samples of random token ids, for want of a tokenizer; the result shows size and speed, "
        "not quality: give a calibration file of token ids",
    )


def few_samples(num_samples: int) -> CalibrationWarning | None:
    """Fewer than 128 samples."""
    if num_samples >= MIN_SAMPLES:
        return None
    return CalibrationWarning(name="few-samples", text=f"{num_samples} samples; give at least {MIN_SAMPLES}")


def few_tokens(num_tokens: int, width: int) -> CalibrationWarning | None:
    """Fewer than four tokens for each input of the widest linear layer, whose in_features is `width`."""
    if num_tokens >= TOKENS_PER_COLUMN * width:
        return None
    return CalibrationWarning(
        name="few-tokens",
        text=f"{num_tokens} tokens for layers of up to {width} inputs; at least {TOKENS_PER_COLUMN} an input, "
        f"{TOKENS_PER_COLUMN * width}, are needed: give more or longer samples",
    )


def repeated(samples: Sequence[npt.NDArray[np.int64]]) -> CalibrationWarning | None:
    """Samples that are mostly copies of each other, or say the same few words over and over."""
    if len(samples) < 2 and sum(map(len, samples)) < 8 * NGRAM:
        return None
    distinct = len({sample.tobytes() for sample in samples})
    if distinct < MIN_DISTINCT_SAMPLES * len(samples):
        return CalibrationWarning(
            name="repeated",
            text=f"only {distinct} of {len(samples)} samples are distinct; remove duplicates and give more varied ones",
        )
    ngrams = np.concatenate([_hashed_ngrams(sample) for sample in samples])
    share = len(np.unique(ngrams)) / max(1, len(ngrams))
    if len(ngrams) < 8 * NGRAM or share >= MIN_DISTINCT_NGRAMS:
        return None
    return CalibrationWarning(
        name="repeated",
        text=f"only {share:.0%} of the runs of {NGRAM} tokens are distinct (at least {MIN_DISTINCT_NGRAMS:.0%} are expected); "
        "the samples repeat the same text: give more varied ones",
    )


def _hashed_ngrams(sample: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """A 64-bit number for each run of NGRAM tokens; collisions are too rare to matter to a share."""
    count = max(0, len(sample) - NGRAM + 1)
    mixed = np.zeros(count, np.uint64)
    for offset in range(NGRAM):
        mixed = mixed * np.uint64(0x9E3779B97F4A7C15) + sample[offset : offset + count].astype(np.uint64) + np.uint64(1)
    return mixed


def wrong_language(texts: Iterable[str], tokenizer: Tokenizer, *, max_characters: int = 200_000) -> CalibrationWarning | None:
    """Text in a script that the tokenizer can only spell byte by byte, or does not know: the model cannot have learnt it.

    Looks at words outside ASCII, script by script, in the first `max_characters`. A tokenizer that spells English by bytes as well, as
    those of byte models do, is not judged.
    """
    words: dict[str, Counter[str]] = {}
    for text in texts:
        for word in text[: max(0, max_characters)].split():
            letters = "".join(character for character in word if unicodedata.category(character)[0] in "LM")
            if letters:
                words.setdefault(_script(letters), Counter())[letters] += 1
        max_characters -= len(text)
    letters_of = {script: sum(len(word) * n for word, n in counts.items()) for script, counts in words.items()}
    english = _cost(_ENGLISH.split(), tokenizer)
    if english > MAX_ASCII_COST:
        return None
    for script, count in sorted(letters_of.items(), key=lambda item: -item[1]):
        share = count / sum(letters_of.values())
        if script != "LATIN" and share >= MIN_SCRIPT_SHARE:
            cost = _cost([word for word, _ in words[script].most_common(2000)], tokenizer)
            if cost > MAX_SCRIPT_COST:
                name = script if script == "CJK" else script.capitalize()
                return CalibrationWarning(
                    name="wrong-language",
                    text=f"{share:.0%} of the letters are {name}, on which the tokenizer spends {cost:.2f} tokens a byte "
                    f"(English: {english:.2f}): the model was not made for this script; calibrate with what it will serve",
                )
    return None


_ENGLISH = "people who were asked about their work said that nothing would change before the beginning of next year"


def _script(letters: str) -> str:
    """The first word of a letter's Unicode name, which is its script for all but a few."""
    return unicodedata.name(next((c for c in letters if not c.isascii()), "A"), "LATIN").split()[0].partition("-")[0]


def _cost(words: Sequence[str], tokenizer: Tokenizer) -> float:
    """Tokens per UTF-8 byte."""
    tokens = sum(len(tokenizer.encode(f" {word}", add_special_tokens=False)) for word in words)
    return tokens / max(1, sum(len(f" {word}".encode()) for word in words))


def unknown_tokens(samples: Sequence[npt.NDArray[np.int64]], unknown_id: int | None) -> CalibrationWarning | None:
    """More than one token in a hundred is the one for what the vocabulary lacks."""
    total = sum(map(len, samples))
    count = sum(int((sample == unknown_id).sum()) for sample in samples) if unknown_id is not None else 0
    if count <= MAX_UNKNOWN * total:
        return None
    return CalibrationWarning(
        name="wrong-language",
        text=f"{count} of {total} tokens are the tokenizer's unknown token: the model was not made for this text; "
        "calibrate with what it will serve",
    )


def surprise(nll_calibration: float, nll_builtin: float) -> CalibrationWarning | None:
    """The model expects the calibration text far less than the built-in one; both are mean nats per token.

    A model knows the text it is meant for. One and a half times the loss, and a nat more, is gibberish or a language that it lacks: Gemma 3
    270M loses 3.8 on the built-in texts, 1.9 to 4.1 on code, chats and eight less common languages, 5.4 on classical Chinese prose, and
    7.5 on shuffled words and on random letters.
    """
    if not nll_calibration > max(SURPRISE_RATIO * nll_builtin, nll_builtin + SURPRISE_NATS):
        return None
    return CalibrationWarning(
        name="wrong-language",
        text=f"the model's loss on the calibration text is {nll_calibration:.2f} nats a token, on the built-in texts {nll_builtin:.2f}: "
        "the text is not of a kind that it knows; check its language, the tokenizer and the chat template",
    )


def double_bos(num_samples: int, total: int) -> CalibrationWarning | None:
    """Samples that began with the beginning-of-sequence token twice; the repeats were removed."""
    if not num_samples:
        return None
    return CalibrationWarning(
        name="double-bos",
        text=f"{num_samples} of {total} samples wrote out the token that begins a text, which the tokenizer or the chat template adds; "
        "one was kept: remove it from the data, and check that your service does not send it twice",
    )


def no_bos(num_samples: int, total: int) -> CalibrationWarning | None:
    """Token ids without the beginning-of-sequence token that the model's tokenizer puts before a text; left as they are."""
    if not num_samples:
        return None
    return CalibrationWarning(
        name="no-bos",
        text=f"{num_samples} of {total} samples of token ids lack the token that begins a text when the model serves; put it first",
    )


def truncated(num_samples: int, total: int, max_length: int) -> CalibrationWarning | None:
    """Samples that were longer than the calibration's length."""
    if not num_samples:
        return None
    return CalibrationWarning(
        name="truncated",
        text=f"{num_samples} of {total} samples are longer than {max_length} tokens and were cut; break them up or allow a greater length",
    )


def short_samples(samples: Sequence[npt.NDArray[np.int64]], max_length: int) -> CalibrationWarning | None:
    """Samples far shorter than the calibration's length, so that what long contexts do to activations is not seen."""
    mean = sum(map(len, samples)) / max(1, len(samples))
    if mean >= SHORT_SHARE * max_length:
        return None
    return CalibrationWarning(
        name="short-samples",
        text=f"samples of {mean:.0f} tokens on average, of {max_length} allowed; use samples as long as your traffic",
    )


def partly_read(where: str, num_records: int, bytes_read: int, size: int) -> CalibrationWarning | None:
    """A file larger than what is looked at."""
    if bytes_read >= size:
        return None
    return CalibrationWarning(
        name="partly-read",
        text=f"{where}: only the first {bytes_read} of {size} bytes ({num_records} records) were considered; "
        "shuffle the file if it is sorted",
    )


def blank_records(num_blank: int, total: int) -> CalibrationWarning | None:
    """Records without any text or token."""
    if not num_blank:
        return None
    return CalibrationWarning(
        name="blank-records", text=f"{num_blank} of {total} records hold no text and were left out; remove them from the file"
    )
