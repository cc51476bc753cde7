"""The sampling kernel: greedy ties, what the filters keep, draws that follow the distribution, and logits no model should produce."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from llmc.codegen.triton.sampling import sample_kernel
from llmc.errors import TargetError
from numpy.typing import NDArray

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinities that the kernel means
SETTINGS = np.dtype(
    [("temperature", "f4"), ("top_k", "i4"), ("top_p", "f4"), ("min_p", "f4"), ("seed", "u8"), ("offset", "u8")]
)
Sample = Callable[..., NDArray[np.int32]]
EXTREMES = (134_664, 145_042)  # with seed 7, the numbers at these offsets are 5e-6 and 1 - 2e-6


def records(count: int, **options: Any) -> NDArray[Any]:
    """Settings of `count` rows at consecutive offsets; by default everything is kept."""
    table = np.zeros(count, SETTINGS)
    table["temperature"], table["top_p"], table["seed"] = 1.0, 1.0, 7
    table["offset"] = np.arange(count)
    for name, value in options.items():
        table[name] = value
    return table


@pytest.fixture(scope="session")
def sample(launch: Callable[..., None]) -> Sample:
    """`sample(logits [R, V], records)` -> token ids; one logit row is taken for all records."""

    def run(logits: NDArray[np.float32], table: NDArray[Any]) -> NDArray[np.int32]:
        rows = np.ascontiguousarray(np.broadcast_to(logits, (len(table), logits.shape[-1])))
        ids = np.full(len(table) + 1, -77, np.int32)
        arguments = {"logits": rows, "settings_f32": table, "settings_i32": table, "settings_i64": table, "token_ids": ids}
        launch(sample_kernel(logits.shape[-1]), arguments | {"num_rows": len(table)}, R=len(table))
        assert ids[-1] == -77
        return ids[:-1]

    return run


def softmax(x: NDArray[Any]) -> NDArray[np.float64]:
    e = np.exp(x.astype(np.float64) - x.max())
    return e / e.sum()


def kept_by_sorting(logits: NDArray[np.float32], temperature: float, top_k: int, top_p: float, min_p: float) -> list[int]:
    """What the filters leave, in the ranking: equal logits by index."""
    p = softmax(logits.astype(np.float64) / temperature)
    order = [int(i) for i in np.argsort(-logits, kind="stable") if p[i] >= min_p * p.max()]
    if top_k:
        order = order[:top_k]
    if top_p >= 1:
        return order
    share = np.cumsum(p[order]) / p[order].sum()
    return order[: int(np.searchsorted(share, top_p)) + 1]


def uniforms(table: NDArray[Any]) -> list[float]:
    """Philox 4x32-10 by Python's integers: the CPU kernels' numbers for these seeds and offsets."""
    numbers = []
    for seed, offset in zip(table["seed"].tolist(), table["offset"].tolist(), strict=True):
        key, c = [seed & 0xFFFFFFFF, seed >> 32], [offset & 0xFFFFFFFF, offset >> 32, 0, 0]
        for _ in range(10):
            a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
            c = [(b >> 32) ^ c[1] ^ key[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ key[1], a & 0xFFFFFFFF]
            key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
        numbers.append(((c[0] << 32 | c[1]) >> 11) * 2.0**-53)
    return numbers


def drawn_by_hand(logits: NDArray[np.float32], table: NDArray[Any]) -> NDArray[np.int64]:
    """The inverse of the cumulative distribution in index order, for each record."""
    ids = []
    for record, uniform in zip(table, uniforms(table), strict=True):
        options = {name: float(record[name]) for name in ("temperature", "top_p", "min_p")}
        kept = sorted(kept_by_sorting(logits, top_k=int(record["top_k"]), **options))
        p = softmax(logits[kept].astype(np.float64) / options["temperature"])
        ids.append(kept[int(np.searchsorted(np.cumsum(p), uniform, side="right"))])
    return np.array(ids)


@pytest.mark.parametrize("vocab", [1, 15, 16, 1000, 2048, 5003])
def test_greedy_takes_the_first_of_equals(sample: Sample, vocab: int) -> None:
    logits = np.random.default_rng(0).standard_normal((4, vocab)).astype(np.float32)
    logits[1, [vocab // 3, vocab // 2, vocab - 1]] = 9.0
    logits[2] = -3.0
    table = records(4, temperature=[0, 0, 0, 1], top_k=[0, 4, 0, 1], top_p=[1, 0.5, 1, 1])
    np.testing.assert_array_equal(sample(logits, table), logits.argmax(axis=1))


@pytest.mark.slow
def test_draws_follow_the_tempered_softmax(sample: Sample) -> None:
    logits = np.random.default_rng(5).standard_normal(50).astype(np.float32)
    count = 500
    observed = np.bincount(sample(logits, records(count, temperature=1.4)), minlength=50)
    expected = count * softmax(logits.astype(np.float64) / np.float32(1.4))
    chi_square = ((observed - expected) ** 2 / expected).sum()
    assert chi_square < 49 + 4 * np.sqrt(2 * 49)  # four standard deviations above the mean
    assert chi_square > 49 - 4 * np.sqrt(2 * 49)  # as bad: draws more even than chance


FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 5},
    {"top_k": 39},
    {"top_k": 99},
    {"top_p": 0.5},
    {"top_p": 0.999},
    {"top_p": 0.0},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.7},
    {"top_k": 8, "top_p": 0.9, "min_p": 0.1},
    {"top_k": 3, "min_p": 0.3, "temperature": 4.0},
    {"top_k": 30, "top_p": 0.97, "temperature": 2.0},
    {"top_p": 0.8, "temperature": 0.05},
    {"top_p": 0.9, "temperature": 50.0},
]


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_filters_keep_exactly_what_sorting_keeps(sample: Sample, options: dict[str, Any]) -> None:
    """With the logits in falling order, a random number next to 1 draws the last token kept and one next to 0 the first."""
    logits = np.sort(2 * np.random.default_rng(3).standard_normal(40).astype(np.float32))[::-1].copy()
    table = records(2, offset=EXTREMES, **options)
    kept = kept_by_sorting(logits, **{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | options)
    assert list(sample(logits, table)) == [kept[0], kept[-1]]


@pytest.mark.parametrize("options", FILTERS[::3], ids=str)
def test_draws_are_those_of_sorting(sample: Sample, options: dict[str, Any]) -> None:
    """Each draw is the one that the sorted reference makes of the CPU kernels' random number."""
    logits = (2 * np.random.default_rng(3).standard_normal(40)).astype(np.float32)
    table = records(20, **options)
    table["offset"] += 1 << 40
    np.testing.assert_array_equal(sample(logits, table), drawn_by_hand(logits, table))


def test_ties_at_the_border_go_to_the_lower_index(sample: Sample) -> None:
    logits = np.zeros(3001, np.float32)
    logits[[5, 2500]] = -0.0, 1.0
    assert list(sample(logits, records(2, offset=EXTREMES, top_k=4))) == [0, 2500]
    assert list(sample(logits, records(2, offset=EXTREMES, top_k=2900))) == [0, 2899]  # all up to there
    logits[2500] = 0.0
    assert list(sample(logits, records(2, offset=EXTREMES, top_p=4.5 / 3001))) == [0, 4]
    assert list(sample(logits, records(2, offset=EXTREMES, top_k=6, top_p=0.5))) == [0, 2]
    assert list(sample(logits, records(2, offset=EXTREMES, top_p=0.0))) == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize(("vocab", "spread"), [(4096, 0.01), (5003, 3.0), (20_002, 3.0)])
def test_vocabularies_of_many_blocks(sample: Sample, vocab: int, spread: float) -> None:
    logits = (spread * np.random.default_rng(vocab).standard_normal(vocab)).astype(np.float32)
    table = records(8)
    table["top_k"] = [2, 50, 1000, 0, 0, 0, 100, 3000]
    table["top_p"] = [1, 1, 1, 0.1, 0.9, 1, 0.5, 0.99]
    table["min_p"] = [0, 0, 0, 0, 0, 0.3, 0.01, 0]
    table["temperature"] = [1, 0.5, 2, 1, 0.8, 1, 1.5, 1]
    np.testing.assert_array_equal(sample(logits, table), drawn_by_hand(logits, table))
    table["offset"] = EXTREMES[1]
    falling = np.sort(logits)[::-1].copy()
    np.testing.assert_array_equal(sample(falling[None], table[:3]), drawn_by_hand(falling, table[:3]))


def test_a_draw_depends_on_its_own_row_alone(sample: Sample) -> None:
    logits = np.random.default_rng(1).standard_normal((4, 3000)).astype(np.float32)
    table = records(
        4, seed=[3, 3 + (1 << 63), 3, 4], offset=[1, 1, 1 + (1 << 32), 1], top_k=[0, 50, 0, 9], top_p=[1, 1, 0.9, 0.8]
    )
    batch = sample(logits, table)
    for row in (3, 0, 2, 1):
        assert sample(logits[row], table[row : row + 1])[0] == batch[row]
    same = sample(logits[0], records(4, seed=table["seed"], offset=table["offset"]))
    assert len(set(same.tolist())) == 4  # all 128 bits of seed and offset matter


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1e-38, 1e30])
def test_degenerate_logits(sample: Sample, temperature: float) -> None:
    n = 100
    nothing = np.full(n, -np.inf, np.float32)
    nan = np.full(n, np.nan, np.float32)
    mixed = nan.copy()
    mixed[[3, 70]] = (-5.0, 50.0)
    infinite = np.zeros(n, np.float32)
    infinite[40] = np.inf
    single = nothing.copy()
    single[60] = -1e30
    extreme = nothing.copy()
    extreme[[7, 50]] = (-3.4e38, 3.4e38)
    logits = np.stack([nothing, nan, infinite, single, mixed, extreme])
    for filters in ({}, {"top_k": 10, "top_p": 0.9, "min_p": 0.01}, {"top_p": 0.0}):
        ids = sample(logits, records(6, temperature=temperature, **filters))
        assert list(ids[:4]) == [0, 0, 40, 60]
        assert ids[4] in (3, 70)
        assert ids[5] in (7, 50)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90", "sm_100", "gfx942"])
def test_builds_without_spills(build_for: Callable[..., Any], arch: str) -> None:
    built = build_for(arch, [sample_kernel(vocab) for vocab in (97, 128_256, 151_936, 262_144)])
    assert all(len(kernel.binary) < 100_000 for kernel in built.values())  # the loops over the vocabulary are loops


def test_names_tell_kernels_apart() -> None:
    kernels = [sample_kernel(vocab) for vocab in (16, 17, 151_936)]
    assert len({kernel.name for kernel in kernels}) == len({kernel.source() for kernel in kernels}) == 3


def test_refuses_a_vocabulary_beyond_its_counters() -> None:
    with pytest.raises(TargetError, match="a vocabulary of 10000000 tokens, expected 1 to 4190208"):
        sample_kernel(10_000_000)
