"""allocate: limits are kept, more room never hurts, and on convex choices nothing beats it but by part of one step."""

from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st
from llmc.quantization.allocate import Choice, allocate

_parts = st.lists(
    st.lists(st.tuples(st.integers(1, 200), st.floats(0, 1)), min_size=1, max_size=4, unique_by=lambda c: c[0]),
    min_size=1,
    max_size=4,
)


def _options(parts: list[list[tuple[int, float]]]) -> dict[str, list[Choice]]:
    return {str(i): [Choice(format=f"f{b}", num_bytes=b, kl=kl) for b, kl in part] for i, part in enumerate(parts)}


@settings(max_examples=80, deadline=None)
@given(_parts, st.integers(1, 900))
def test_a_budget_is_kept_where_it_can_be(parts: list[list[tuple[int, float]]], budget: int) -> None:
    options = _options(parts)
    found = allocate(options, max_bytes=budget)
    smallest = sum(min(c.num_bytes for c in choices) for choices in options.values())
    assert found.num_bytes <= max(budget, smallest)
    assert found.kl >= allocate(options, max_bytes=budget + 100).kl - 1e-12
    best = min(
        (sum(c.kl for c in pick) for pick in product(*options.values()) if sum(c.num_bytes for c in pick) <= budget),
        default=None,
    )
    if best is not None:
        step = max(max(c.kl for c in choices) - min(c.kl for c in choices) for choices in options.values())
        assert found.kl <= best + step + 1e-9


@settings(max_examples=80, deadline=None)
@given(_parts, st.floats(0.001, 3))
def test_a_divergence_is_kept_where_it_can_be(parts: list[list[tuple[int, float]]], limit: float) -> None:
    options = _options(parts)
    found = allocate(options, max_kl=limit)
    least = sum(min(c.kl for c in choices) for choices in options.values())
    assert found.kl <= max(limit, least) + 1e-9
    assert allocate(options, max_kl=2 * limit).num_bytes <= found.num_bytes


def test_bits_go_where_they_count() -> None:
    def part(weight: float) -> list[Choice]:
        return [Choice(format=str(bits), num_bytes=bits, kl=weight * 4.0**-bits) for bits in (3, 4, 5, 6, 8)]

    found = allocate({"dull": part(1), "touchy": part(4096)}, max_bytes=11)
    assert found.formats() == {"dull": "3", "touchy": "8"}
