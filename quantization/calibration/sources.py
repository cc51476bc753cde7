"""Reads a calibration file, line by line and no further than needed, into chats, texts and token ids."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from ...errors import RequestError
from ...runtime.chat import Message, check_messages
from .calibration import CalibrationError

MAX_LINE_BYTES = 16 << 20
MAX_FILE_BYTES = 64 << 20  # what is looked at of one file

_JSONL_SUFFIXES = (".jsonl", ".ndjson")
_EXPECTED = """expected one of {"messages": [...]}, {"text": "..."} and {"token_ids": [...]}"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One line of a JSONL file, or one paragraph of a text; exactly one of the three contents is set."""

    where: str  # file:line, for errors
    messages: list[Message] | None = None
    text: str | None = None
    token_ids: list[int] | None = None

    def texts(self) -> list[str]:
        """What a person would read of it."""
        if self.text is not None:
            return [self.text]
        return [str(message["content"] or "") for message in self.messages or []]


@dataclass(slots=True, kw_only=True)
class Source:
    """What was read of a file."""

    records: list[Record] = field(default_factory=list)
    is_plain_text: bool = False
    num_blank: int = 0  # records without a character or a token, left out
    bytes_read: int = 0
    size: int = 0  # of the file; more than `bytes_read` if it was read in part


def read_source(path: Path, *, max_records: int, max_text_bytes: int) -> Source:
    """The first `max_records` chats, texts or ids of a JSONL file, or the paragraphs of `max_text_bytes` of a plain text.

    A file is JSONL if its name ends in .jsonl or .ndjson or its first line that is not blank is a JSON object with one of the keys
    messages, text and token_ids. Raises CalibrationError, with the line, for what is neither.
    """
    if not path.is_file():
        found = "a folder" if path.is_dir() else "no regular file" if path.exists() else "no such file"
        raise CalibrationError(f"{path}: {found}; expected a JSONL file of chats, texts or token ids, or a plain text")
    try:
        with path.open("rb") as file:
            source = Source(size=path.stat().st_size)
            first = next((line for _, line in _lines(file, path) if line.strip()), "")
            file.seek(0)
            if path.suffix.lower() in _JSONL_SUFFIXES or _looks_like_jsonl(first):
                _read_jsonl(file, path, source, max_records)
            else:
                source.is_plain_text = True
                _read_paragraphs(file, path, source, min(max_text_bytes, MAX_FILE_BYTES))
            source.bytes_read = min(file.tell(), source.size)
            return source
    except OSError as error:
        raise CalibrationError(f"{path}: cannot be read ({error.strerror or error})") from error


def _lines(file: BinaryIO, path: Path) -> Iterator[tuple[int, str]]:
    """The lines and their numbers from 1, with their ends, without a byte order mark."""
    number = 0
    while data := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(data) > MAX_LINE_BYTES:
            raise CalibrationError(f"{path}:{number}: a line of more than {MAX_LINE_BYTES >> 20} MiB; break it up")
        try:
            yield number, data.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise CalibrationError(
                f"{path}:{number}: not UTF-8 text (byte 0x{data[error.start]:02x} at column {error.start + 1}); "
                "convert the file to UTF-8"
            ) from None


def _looks_like_jsonl(line: str) -> bool:
    if not line.lstrip().startswith("{"):
        return False
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and bool(value.keys() & {"messages", "text", "token_ids"})


def _read_jsonl(file: BinaryIO, path: Path, source: Source, max_records: int) -> None:
    for number, line in _lines(file, path):
        if line.strip():
            record = _record(line, f"{path}:{number}")
            if (record.text is not None and not record.text.strip()) or record.token_ids == []:
                source.num_blank += 1
            else:
                source.records.append(record)
        if len(source.records) >= max_records or file.tell() >= MAX_FILE_BYTES:
            return


def _record(line: str, where: str) -> Record:
    """The record of one line of JSONL; raises CalibrationError."""
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CalibrationError(f"{where}: not JSON ({' '.join(str(error).split())[:200]}); {_EXPECTED}") from None
    if not isinstance(value, dict):
        raise CalibrationError(f"{where}: {line.strip():.60} is no JSON object; {_EXPECTED}")
    keys = [key for key in ("messages", "text", "token_ids") if key in value]
    if len(keys) != 1:
        found = f"both {keys[0]} and {keys[1]}" if keys else f"the keys {', '.join(value) or 'of an empty object'}"
        raise CalibrationError(f"{where}: found {found:.200}; {_EXPECTED}")
    content = value[keys[0]]
    if keys == ["text"]:
        if not isinstance(content, str):
            raise CalibrationError(f"{where}: text is {content!r:.60}; expected a string")
        if not _is_unicode(content):
            raise CalibrationError(
                f"{where}: text holds half a surrogate pair, which is not Unicode; write the character itself"
            )
        return Record(where=where, text=content)
    if not isinstance(content, list):
        raise CalibrationError(f"{where}: {keys[0]} is {content!r:.60}; expected a list")
    if keys == ["token_ids"]:
        for index, token_id in enumerate(content):
            if not isinstance(token_id, int) or isinstance(token_id, bool):
                raise CalibrationError(f"{where}: token_ids[{index}] is {token_id!r:.60}; expected a whole number")
        return Record(where=where, token_ids=content)
    try:
        return Record(where=where, messages=list(check_messages(content)))
    except RequestError as error:
        raise CalibrationError(f"{where}: {error}") from None


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_paragraphs(file: BinaryIO, path: Path, source: Source, max_bytes: int) -> None:
    paragraph: list[str] = []
    start = 1
    for number, line in _lines(file, path):
        enough = file.tell() >= max_bytes
        if line.strip():
            if not paragraph:
                start = number
            paragraph.append(line)
        if paragraph and (enough or not line.strip()):
            source.records.append(_paragraph(paragraph, path, start))
            paragraph = []
        if enough:
            return
    if paragraph:
        source.records.append(_paragraph(paragraph, path, start))


def _paragraph(lines: list[str], path: Path, start: int) -> Record:
    return Record(where=f"{path}:{start}", text="".join(lines).rstrip())
