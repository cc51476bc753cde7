"""The built-in texts: small, in a dozen languages and as many kinds of code, for a first try without data of one's own."""

from __future__ import annotations

from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent / "texts"


@cache
def builtin_texts() -> dict[str, str]:
    """The texts by file name, in alphabetical order; texts/README.md says where each is from."""
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.txt"))}


def paragraphs_of(text: str) -> list[str]:
    """What blank lines separate, with indentation kept."""
    return [paragraph for part in text.split("\n\n") if (paragraph := part.strip("\n"))]
