"""Typed access to a config's `quantization_config`: every missing, mistyped or impossible entry is one sentence."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ....errors import CheckpointError, UnsupportedModelError
from ..base import printable


class Settings:
    """The entries of one JSON object; `where` names it in errors, as in `config.json: quantization_config`."""

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self.values = values
        self.where = where

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int = 1 << 24) -> int:
        """An integer from `low` to `high`; a default of None makes it required."""
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.wrong(key, f"an integer from {low} to {high}")
        return value

    def group_size(self, key: str, default: int | None) -> int | None:
        """Columns that share a scale; None for -1, a whole row."""
        value = self.integer(key, -1 if default is None else default, low=-1)
        if value == 0:
            raise self.wrong(key, "-1 for a whole row, or at least 1")
        return None if value == -1 else value

    def flag(self, key: str, default: bool) -> bool:
        """true or false."""
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str | None:
        """A string in lower case."""
        value = self.values.get(key)
        value = default if value is None else value
        if value is not None and not isinstance(value, str):
            raise self.wrong(key, "a string")
        return None if value is None else value.lower()

    def choice(self, key: str, known: Iterable[str], default: str | None = None) -> str:
        """One of `known`, else `UnsupportedModelError`."""
        value, known = self.text(key, default), tuple(known)
        if value not in known:
            raise UnsupportedModelError(f"{self.where}.{key} {value!r} is not supported; supported: {', '.join(known)}")
        return value

    def names(self, *keys: str) -> tuple[str, ...]:
        """The strings under all of `keys`, which are lists or absent."""
        found: list[str] = []
        for key in keys:
            value = self.values.get(key) or []
            if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
                raise self.wrong(key, "a list of module names")
            found += value
        return tuple(found)

    def pair(self, key: str) -> tuple[int, int] | None:
        """Two positive integers, or None where absent."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != 2:
            raise self.wrong(key, "two positive integers")
        parts = Settings({str(i): item for i, item in enumerate(value)}, f"{self.where}.{key}")
        return parts.integer("0"), parts.integer("1")

    def nested(self, key: str) -> Settings | None:
        """The object under `key`, or None where absent."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return Settings(value, f"{self.where}.{printable(key)}")

    def wrong(self, key: str, expected: str) -> CheckpointError:
        """The error for an entry that is not what it must be."""
        found = f"is {self.values[key]!r}" if self.values.get(key) is not None else "is absent"
        return CheckpointError(f"{self.where}.{printable(key)} {found[:200]}, expected {expected}")

    def matches(self, pattern: str, name: str) -> bool:
        """Whether the regular expression matches from the start of `name`."""
        try:
            return re.match(pattern, name) is not None
        except (re.error, RecursionError, OverflowError) as error:
            raise CheckpointError(f"{self.where}: {pattern[:100]!r} is not a regular expression ({error})") from error

    def covers(self, patterns: Iterable[str], names: Iterable[str]) -> bool:
        """Whether a list of exceptions has one of a module's names: `re:` and an expression, the name, or a part of it."""
        return any(
            self.matches(pattern[3:], name) if pattern.startswith("re:") else pattern in name
            for pattern in patterns
            for name in names
            if pattern
        )
