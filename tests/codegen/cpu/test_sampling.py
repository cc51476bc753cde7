"""Sampling: greedy ties, filters, draws that follow the distribution, and logits no model should produce."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest


def _greedy(sampling: Any) -> Any:
    return sampling(temperature=0, top_k=0, top_p=1, min_p=0, seed=0, offset=0)


def _softmax(x: Any) -> Any:
    e = np.exp(x.astype(np.float64) - x.max())
    return e / e.sum()


def _draw(kernels: Any, sampling: Any, logits: Any, count: int, **options: Any) -> Any:
    """`count` draws from one row of logits, at consecutive offsets."""
    settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 7, **options}
    rows = np.tile(logits, (count, 1))
    ids, _ = kernels.sample(rows, [sampling(offset=i, **settings) for i in range(count)], threads=2)
    return ids


@pytest.mark.parametrize("vocab", [1, 15, 16, 1000, 262_144])
def test_greedy_takes_the_first_of_equals(kernels: Any, sampling: Any, vocab: int) -> None:
    logits = np.random.default_rng(0).standard_normal((3, vocab)).astype(np.float32)
    logits[1, [vocab // 3, vocab // 2, vocab - 1]] = 9.0
    ids, logp = kernels.sample(logits, [_greedy(sampling)] * 3, threads=2)
    np.testing.assert_array_equal(ids, logits.argmax(axis=1))
    want = [np.log(_softmax(row)[i]) for row, i in zip(logits, ids, strict=True)]
    np.testing.assert_allclose(logp, want, atol=2e-5)


def test_draws_follow_the_tempered_softmax(kernels: Any, sampling: Any) -> None:
    logits = np.array([1.0, 0.0, 2.0, -1.0, 1.0], np.float32)
    ids = _draw(kernels, sampling, logits, 20_000, temperature=0.7)
    counts = np.bincount(ids, minlength=5) / len(ids)
    np.testing.assert_allclose(counts, _softmax(logits / 0.7), atol=0.012)


def _kept(logits: Any, top_k: int, top_p: float, min_p: float) -> set[int]:
    """Reference filters, in the documented order, by sorting."""
    p = _softmax(logits)
    order = [i for i in np.argsort(-logits, kind="stable") if p[i] >= min_p * p.max()]
    if top_k:
        order = order[:top_k]
    share = np.cumsum(p[order]) / p[order].sum()
    return set(order[: int(np.searchsorted(share, top_p - 1e-9)) + 1] if top_p < 1 else order)


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (1, 1.0, 0.0),
        (5, 1.0, 0.0),
        (0, 0.5, 0.0),
        (0, 1.0, 0.2),
        (20, 0.7, 0.0),
        (8, 0.9, 0.1),
        (0, 0.0, 0.0),
        (99, 1.0, 0.0),
    ],
)
def test_filters_keep_exactly_what_sorting_keeps(kernels: Any, sampling: Any, top_k: int, top_p: float, min_p: float) -> None:
    logits = (2 * np.random.default_rng(3).standard_normal(40)).astype(np.float32)
    logits[7] = logits[11] = logits[30]
    ids = _draw(kernels, sampling, logits, 6_000, top_k=top_k, top_p=top_p, min_p=min_p)
    kept = _kept(logits, top_k, top_p, min_p)
    assert set(ids) <= kept
    p = _softmax(logits)
    total = sum(p[i] for i in kept)
    for i in kept:
        assert abs((ids == i).mean() - p[i] / total) < 0.025


def test_ties_at_the_top_k_border_go_to_the_lower_index(kernels: Any, sampling: Any) -> None:
    ids = _draw(kernels, sampling, np.zeros(50, np.float32), 500, top_k=3)
    assert set(ids) == {0, 1, 2}


def test_draw_depends_on_seed_and_offset_alone(kernels: Any, sampling: Any) -> None:
    logits = np.random.default_rng(1).standard_normal((1, 50_000)).astype(np.float32)
    for options in ({"top_k": 0, "top_p": 1.0}, {"top_k": 50, "top_p": 0.9}):
        params = [sampling(temperature=1.0, min_p=0.0, seed=3, offset=i, **options) for i in range(12)]
        alone = [int(kernels.sample(logits, [p], threads=2)[0][0]) for p in params]
        batch, _ = kernels.sample(np.tile(logits, (12, 1)), params, threads=2)
        single, _ = kernels.sample(np.tile(logits, (12, 1)), params, threads=1)
        assert alone == list(batch) == list(single)
        assert len(set(alone)) > 1


def test_logprob_is_of_the_untempered_softmax(kernels: Any, sampling: Any) -> None:
    logits = np.random.default_rng(1).standard_normal((1, 3_000)).astype(np.float32)
    ids, logp = kernels.sample(logits, [sampling(temperature=2.0, top_k=5, top_p=1, min_p=0, seed=1, offset=1)])
    assert logp[0] == pytest.approx(np.log(_softmax(logits[0])[ids[0]]), abs=2e-5)
    assert np.isnan(kernels.sample(logits, [_greedy(sampling)], logprobs=False)[1]).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1e-38, 1e30])
def test_degenerate_logits(kernels: Any, sampling: Any, temperature: float) -> None:
    options = {"temperature": temperature, "top_k": 10, "top_p": 0.9, "min_p": 0.01, "seed": 1, "offset": 1}
    n = 100
    nothing = np.full(n, -np.inf, np.float32)
    nan = np.full(n, np.nan, np.float32)
    mixed = nan.copy()
    mixed[[3, 70]] = (-5.0, 50.0)
    infinite = np.zeros(n, np.float32)
    infinite[40] = np.inf
    single = nothing.copy()
    single[60] = -1e30
    ids, _ = kernels.sample(np.stack([nothing, nan, infinite, single]), [sampling(**options)] * 4)
    assert list(ids) == [0, 0, 40, 60]
    assert kernels.sample(mixed[None], [sampling(**options)])[0][0] in (3, 70)
    options.update(top_k=0, top_p=1.0, min_p=0.0)
    ids, _ = kernels.sample(np.stack([nothing, nan, infinite, single]), [sampling(**options)] * 4)
    assert list(ids) == [0, 0, 40, 60]
