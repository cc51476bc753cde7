"""The environment variables that llmc reads, each declared once with its type, default and meaning."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from .errors import UsageError

T = TypeVar("T")

_LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable(Generic[T]):
    """One variable; `get()` reads the environment at the time of the call and raises UsageError for a bad value."""

    name: str
    type: str
    default: str
    meaning: str
    parse: Callable[[str], T]
    make_default: Callable[[], T]

    def get(self) -> T:
        """The value in effect; unset and empty both mean the default."""
        text = os.environ.get(self.name, "")
        if not text:
            return self.make_default()
        try:
            return self.parse(text)
        except ValueError as error:
            raise UsageError(f"{self.name}={text!r}: {error}; expected {self.type}") from None


def _thread_count(text: str) -> int:
    try:
        count = int(text)
    except ValueError:
        raise ValueError("not a whole number") from None
    if not 1 <= count <= 256:
        raise ValueError("out of range")
    return count


def _log_level(text: str) -> str:
    level = text.lower()
    if level not in _LOG_LEVELS:
        raise ValueError("not a log level")
    return level


def _folder(text: str) -> Path:
    path = Path(text).expanduser()
    if path.exists() and not path.is_dir():
        raise ValueError("exists and is not a folder")
    return path


HOME: Variable[Path] = Variable(
    name="LLMC_HOME",
    type="a folder",
    default="~/.llmc",
    meaning="where llmc keeps its own files",
    parse=_folder,
    make_default=lambda: Path.home() / ".llmc",
)
CACHE: Variable[Path] = Variable(
    name="LLMC_CACHE",
    type="a folder",
    default="$LLMC_HOME/cache",
    meaning="files that can be deleted at any time: they are made again when needed",
    parse=_folder,
    make_default=lambda: HOME.get() / "cache",
)
DUMP_DIR: Variable[Path | None] = Variable(
    name="LLMC_DUMP_DIR",
    type="a folder",
    default="no dumps",
    meaning="where the compiler writes the graph after each pass, as --dump-ir does",
    parse=_folder,
    make_default=lambda: None,
)
LOG: Variable[str] = Variable(
    name="LLMC_LOG",
    type=f"one of {', '.join(_LOG_LEVELS)}",
    default="warning",
    meaning="how much is logged on stderr; debug also shows the traceback of an unexpected error",
    parse=_log_level,
    make_default=lambda: "warning",
)
NUM_THREADS: Variable[int | None] = Variable(
    name="LLMC_NUM_THREADS",
    type="a whole number from 1 to 256",
    default="the CPUs this process may use",
    meaning="threads of one step on a CPU target",
    parse=_thread_count,
    make_default=lambda: None,
)

VARIABLES: tuple[Variable[Path] | Variable[Path | None] | Variable[str] | Variable[int | None], ...] = (
    HOME,
    CACHE,
    DUMP_DIR,
    LOG,
    NUM_THREADS,
)
