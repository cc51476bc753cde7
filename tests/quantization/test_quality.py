"""quality: figures by hand, and that nothing depends on how rows are handed over."""

from __future__ import annotations

import math

import pytest
import torch
from llmc.quantization.probe import Probe
from llmc.quantization.quality import QualityMeter


def test_equal_models_differ_in_nothing() -> None:
    logits = torch.randn(300, 50, generator=torch.Generator().manual_seed(0))
    meter = QualityMeter()
    meter.add(logits, logits.clone(), torch.arange(300) % 50)
    quality = meter.result()
    assert quality.positions == 300
    assert (quality.kl_mean, quality.kl_max, quality.flips, quality.top1_agreement) == (0, 0, 0, 1)
    assert quality.centred_cosine == pytest.approx(1)
    assert quality.perplexity == quality.reference_perplexity


def test_two_tokens_by_hand() -> None:
    p, q = torch.tensor([[0.75, 0.25]]).log(), torch.tensor([[0.4, 0.6]]).log()
    meter = QualityMeter()
    meter.add(p + 7.0, q - 3.0, torch.tensor([0]))  # logits may be shifted: only differences count
    quality = meter.result()
    assert quality.kl_mean == pytest.approx(0.75 * math.log(0.75 / 0.4) + 0.25 * math.log(0.25 / 0.6), rel=1e-5)
    assert quality.perplexity == pytest.approx(1 / 0.4, rel=1e-5)
    assert quality.reference_perplexity == pytest.approx(1 / 0.75, rel=1e-5)
    assert (quality.top1_agreement, quality.flips) == (0, 1)
    assert quality.centred_cosine == pytest.approx(-1)


def test_rows_may_come_in_any_pieces() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b, ids = torch.randn(257, 9, generator=generator), torch.randn(257, 9, generator=generator), torch.arange(257) % 9
    whole, pieces = QualityMeter(), QualityMeter()
    whole.add(a, b, ids)
    for part in (slice(0, 1), slice(1, 200), slice(200, 257)):
        pieces.add(a[part], b[part], ids[part])
    assert whole.result().as_json() == pieces.result().as_json()


def test_nothing_and_odd_shapes_are_errors() -> None:
    with pytest.raises(ValueError, match="no positions"):
        QualityMeter().result()
    with pytest.raises(ValueError, match="expected"):
        QualityMeter().add(torch.zeros(2, 3), torch.zeros(2, 4), torch.zeros(2, dtype=torch.long))


def test_a_thinned_probe_keeps_rows_with_their_logits() -> None:
    samples = [torch.arange(40), torch.arange(9)]
    rows = [torch.arange(0, 39, 3), torch.arange(8)]
    reference = [rows[0][:, None] * torch.ones(1, 45), 100.0 + rows[1][:, None] * torch.ones(1, 45)]
    thin = Probe(samples, rows, reference).thinned(6, 20)
    assert [len(s) for s in thin.samples] == [21, 9]
    assert 0 < thin.num_rows() <= 7
    for offset, kept, logits in zip((0, 100), thin.rows, thin.reference, strict=True):
        assert (logits[:, 0] == kept + offset).all()
    assert int(thin.rows[0].max()) < 20
    noisy = [logits + torch.randn(logits.shape, generator=torch.Generator().manual_seed(0)) for logits in thin.reference]
    assert thin.mean_kl(noisy) == pytest.approx(thin.compare(noisy).kl_mean, rel=1e-5)
