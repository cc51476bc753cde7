"""Finds stop strings in a growing text and withholds its end while a stop string could still begin there."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Feed text with `push`; what it returns is safe to show."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self.matched: str | None = None
        self._pending = ""

    def push(self, delta: str) -> str:
        """Add text; returns what can no longer become part of a stop string. After a match, always ``""``.

        Of several stop strings the one that begins first ends the text; of those, the longest.
        """
        if self.matched is not None:
            return ""
        self._pending += delta
        found = [(self._pending.find(stop), -len(stop), stop) for stop in self.stops if stop in self._pending]
        if found:
            at, _, self.matched = min(found)
            shown, self._pending = self._pending[:at], ""
            return shown
        keep = self._longest_open_prefix()
        cut = len(self._pending) - keep
        shown, self._pending = self._pending[:cut], self._pending[cut:]
        return shown

    def finish(self) -> str:
        """The withheld rest, once no more text will come."""
        rest, self._pending = self._pending, ""
        return rest

    def _longest_open_prefix(self) -> int:
        most = min(len(self._pending), max((len(stop) for stop in self.stops), default=1) - 1)
        for length in range(most, 0, -1):
            tail = self._pending[-length:]
            if any(stop.startswith(tail) for stop in self.stops):
                return length
        return 0
