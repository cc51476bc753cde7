"""Chooses one of several formats for every part of a model: the least divergence in so many bytes, or the fewest bytes for a divergence."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A format for one part, the bytes it takes and the divergence (nats) it is expected to add."""

    format: str
    num_bytes: int
    kl: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """A choice for each part; divergences of parts add up, as those of small independent errors do."""

    choices: Mapping[str, Choice]

    @property
    def num_bytes(self) -> int:
        """Of all parts."""
        return sum(choice.num_bytes for choice in self.choices.values())

    @property
    def kl(self) -> float:
        """Of all parts together."""
        return sum(choice.kl for choice in self.choices.values())

    def formats(self) -> dict[str, str]:
        """The format of each part."""
        return {name: choice.format for name, choice in self.choices.items()}


@dataclass(frozen=True, slots=True)
class _Move:
    part: str
    choice: Choice
    gain: float  # divergence taken off for each byte


def allocate(
    options: Mapping[str, Sequence[Choice]], *, max_bytes: int | None = None, max_kl: float | None = None
) -> Allocation:
    """Start with the smallest choice of each part and buy back divergence where it costs fewest bytes, along each part's convex hull.

    With `max_bytes`, until nothing more fits; with `max_kl` alone, until the divergence is no more than that. If the limits cannot be
    met the nearest allocation is returned: the smallest there is, or the one of least divergence; the caller compares.
    """
    hulls = {part: _hull(choices) for part, choices in options.items()}
    chosen = {part: hull[0] for part, hull in hulls.items()}
    moves = sorted(
        (move for part, hull in hulls.items() for move in _moves(part, hull)), key=lambda move: (-move.gain, move.part)
    )
    num_bytes = sum(choice.num_bytes for choice in chosen.values())
    kl = sum(choice.kl for choice in chosen.values())
    closed: set[str] = set()  # parts whose next step did not fit: a later one, which is larger, must not be taken for it
    for move in moves:
        if max_bytes is None and max_kl is not None and kl <= max_kl:
            break
        more = move.choice.num_bytes - chosen[move.part].num_bytes
        if move.part in closed or (max_bytes is not None and num_bytes + more > max_bytes):
            closed.add(move.part)
            continue
        kl += move.choice.kl - chosen[move.part].kl
        num_bytes += more
        chosen[move.part] = move.choice
    return Allocation(choices=chosen)


def _hull(choices: Sequence[Choice]) -> list[Choice]:
    """The choices on the lower convex hull of (bytes, divergence), smallest first."""
    hull: list[Choice] = []
    for choice in sorted(choices, key=lambda c: (c.num_bytes, c.kl)):
        if hull and choice.kl >= hull[-1].kl:
            continue
        while len(hull) >= 2 and _gain(hull[-2], hull[-1]) <= _gain(hull[-1], choice):
            hull.pop()
        hull.append(choice)
    return hull


def _gain(a: Choice, b: Choice) -> float:
    return (a.kl - b.kl) / max(b.num_bytes - a.num_bytes, 1)


def _moves(part: str, hull: list[Choice]) -> list[_Move]:
    return [_Move(part, b, _gain(a, b)) for a, b in itertools.pairwise(hull)]
