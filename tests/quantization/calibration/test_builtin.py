"""The built-in texts: enough of them, each accounted for, and none of what quality is measured on."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from llmc.quantization.calibration.builtin import FOLDER, builtin_texts, paragraphs_of

ROOT = Path(__file__).parents[3]
WINDOW = 60  # characters


def test_there_is_enough_and_it_is_accounted_for() -> None:
    texts = builtin_texts()
    assert sum(len(text.encode()) for text in texts.values()) > 150_000
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert [name for name in texts if f"`{name}.txt`" not in readme] == []
    paragraphs = [paragraph for text in texts.values() for paragraph in paragraphs_of(text)]
    assert len(set(paragraphs)) == len(paragraphs)
    letters = "".join(texts.values())
    for sample in ("Ж", "ع", "ह", "の", "的", "ก", "한", "α", "def ", "SELECT", "\\begin{"):
        assert sample in letters


def test_nothing_is_measured_on() -> None:
    spec = importlib.util.spec_from_file_location("texts", ROOT / "benchmarks" / "texts.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    builtin = " ".join(" ".join(text.split()) for text in builtin_texts().values())
    windows = {builtin[i : i + WINDOW] for i in range(len(builtin) - WINDOW)}
    for name, passage in module.passages().items():
        plain = " ".join(passage.split())
        assert [plain[i : i + WINDOW] for i in range(len(plain) - WINDOW) if plain[i : i + WINDOW] in windows] == [], name


def test_paragraphs_keep_their_indentation() -> None:
    assert paragraphs_of("    a\n  b\n\n\n\nc\n") == ["    a\n  b", "c"]
