"""Tells a person at a terminal what a compile is doing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

Item = TypeVar("Item")


class Progress(Protocol):
    """Receives the stages of a compile."""

    def stage(self, name: str) -> None:
        """A stage begins."""

    def track(self, items: Iterable[Item], total: int) -> Iterator[Item]:
        """Pass `items` on, counting them."""

    def done(self, item: str) -> None:
        """Something that takes a while is finished."""


class Silent:
    """Shows nothing."""

    def stage(self, name: str) -> None:
        """Nothing."""

    def track(self, items: Iterable[Item], total: int) -> Iterator[Item]:
        """Pass `items` on."""
        yield from items

    def done(self, item: str) -> None:
        """Nothing."""


class Terminal:
    """A line that is rewritten on a terminal's stderr; silent elsewhere."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import Progress as Bar
        from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

        console = Console(stderr=True)
        self._bar = Bar(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("start")

    def __enter__(self) -> Terminal:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def stage(self, name: str) -> None:
        """Show the stage's name."""
        self._bar.update(self._task, description=name)

    def track(self, items: Iterable[Item], total: int) -> Iterator[Item]:
        """Show how many of `total` are done."""
        for done, item in enumerate(items):
            self._bar.update(self._task, description=f"weights {done}/{total}")
            yield item

    def done(self, item: str) -> None:
        """Show its name."""
        self._bar.update(self._task, description=item)
