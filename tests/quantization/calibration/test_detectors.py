"""Detectors: each fires on what it names, with figures, and is silent on a near miss."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from llmc.quantization.calibration import CalibrationWarning, detectors, layer_detectors
from llmc.quantization.calibration.builtin import builtin_texts, paragraphs_of
from llmc.runtime.tokenizer import Tokenizer
from llmc.runtime.tokenizer_library import WholeTokenizer

RANDOM = np.random.default_rng(0)
FEW_IDS = [RANDOM.integers(0, 3, 200) for _ in range(4)]
VARIED = [RANDOM.integers(0, 600, 200) for _ in range(4)]
ONE_LINE = [np.tile(np.arange(20), 10)[i : i + 150] for i in range(4)]
ONES = np.ones(200)


@pytest.mark.parametrize(
    ("fired", "silent", "name", "figure"),
    [
        (detectors.few_samples(127), detectors.few_samples(128), "few-samples", "127"),
        (detectors.few_tokens(4095, 1024), detectors.few_tokens(4096, 1024), "few-tokens", "4096"),
        (detectors.repeated([VARIED[0]] * 3), detectors.repeated(VARIED), "repeated", "only 1 of 3"),
        (detectors.repeated(ONE_LINE), detectors.repeated(FEW_IDS), "repeated", "only 4%"),
        (detectors.repeated([np.arange(3)] * 5), detectors.repeated([np.arange(3)]), "repeated", "only 1 of 5"),
        (
            detectors.unknown_tokens([np.array([0] * 2 + [5] * 98)], 0),
            detectors.unknown_tokens([np.array([0] + [5] * 99)], 0),
            "wrong-language",
            "2 of 100",
        ),
        (detectors.surprise(7.1, 4.0), detectors.surprise(5.9, 4.0), "wrong-language", "7.10"),
        (detectors.surprise(2.5, 1.0), detectors.surprise(1.9, 1.0), "wrong-language", "2.50"),
        (detectors.double_bos(2, 9), detectors.double_bos(0, 9), "double-bos", "2 of 9"),
        (detectors.no_bos(2, 9), detectors.no_bos(0, 9), "no-bos", "2 of 9"),
        (detectors.truncated(2, 9, 64), detectors.truncated(0, 9, 64), "truncated", "64"),
        (detectors.short_samples([np.arange(9)], 100), detectors.short_samples([np.arange(13)], 100), "short-samples", "9"),
        (detectors.partly_read("f", 3, 10, 20), detectors.partly_read("f", 3, 20, 20), "partly-read", "10 of 20"),
        (detectors.blank_records(1, 4), detectors.blank_records(0, 4), "blank-records", "1 of 4"),
        (detectors.builtin(), None, "builtin", "your own traffic"),
        (detectors.random_tokens(5), None, "random-tokens", "5"),
        (
            layer_detectors.dead_columns("q", np.array([0.0, 1.0])),
            layer_detectors.dead_columns("q", ONES),
            "dead-columns",
            "1 of 2",
        ),
        (
            layer_detectors.split_half("q", ONES, np.where(np.arange(200) < 3, 2.1, 1.0)),
            layer_detectors.split_half("q", ONES, np.where(np.arange(200) < 2, 2.1, 2.0)),
            "split-half",
            "3 of 200",
        ),
        (
            layer_detectors.split_half("q", np.zeros(4), np.ones(4)),
            layer_detectors.split_half("q", np.zeros(4), np.zeros(4)),
            "split-half",
            "4 of 4",
        ),
        (
            layer_detectors.scale_range("q", np.array([0.1, 1.1])),
            layer_detectors.scale_range("q", np.array([0.2, 2.0])),
            "scale-range",
            "11.0",
        ),
        (
            layer_detectors.not_better_than_rtn("q", "gptq", 0.2, 0.2),
            layer_detectors.not_better_than_rtn("q", "gptq", 0.1, 0.2),
            "not-better-than-rtn",
            "0.2",
        ),
        (
            layer_detectors.not_better_than_rtn("q", "gptq", float("nan"), 0.2),
            layer_detectors.not_better_than_rtn("q", "gptq", 0.0, 0.2),
            "not-better-than-rtn",
            "nan",
        ),
        (
            layer_detectors.damping_retries("q", 1, 0.1),
            layer_detectors.damping_retries("q", 0, 0.01),
            "damping-retries",
            "after 1 retry",
        ),
    ],
)
def test_each_fires_and_is_silent(
    fired: CalibrationWarning | None, silent: CalibrationWarning | None, name: str, figure: str
) -> None:
    assert fired is not None
    assert fired.name == name
    assert figure in fired.text
    assert str(fired) == f"{name}: {fired.text}"
    assert silent is None


def test_scripts_the_tokenizer_spells_by_bytes(tokenizer_folder: Path) -> None:
    tokenizer = read(tokenizer_folder)
    for index, script in ((0, "Cyrillic"), (6, "Arabic"), (10, "Devanagari"), (15, "CJK")):
        warning = detectors.wrong_language([paragraphs_of(builtin_texts()["other_scripts"])[index]], tokenizer)
        assert warning is not None
        assert script in warning.text
    assert detectors.wrong_language([builtin_texts()["european"]], tokenizer) is None
    assert detectors.wrong_language(["Tea for two, чай, thé: " + builtin_texts()["chats"]], tokenizer) is None
    assert detectors.wrong_language(["1 + 1 = 2", ""], tokenizer) is None


def test_byte_models_are_not_judged(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Library
    from tokenizers import models, pre_tokenizers

    library = Library(models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = Tokenizer(WholeTokenizer(library.to_str().encode(), "tokenizer.json"), {})
    assert detectors.wrong_language([builtin_texts()["other_scripts"]], tokenizer) is None


def read(folder: Path) -> Tokenizer:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    return Tokenizer(WholeTokenizer((folder / "tokenizer.json").read_bytes(), "tokenizer.json"), config)
