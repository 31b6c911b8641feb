from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_rloo.functional import effective_sample_size
from torchrl_rloo.functional.statistics import (
    NGRAM,
    SKETCH_SIZE,
    masked_mean,
    nanstd,
    ngram_statistics,
    overlap,
    sequence_hash,
    wilson_interval,
)

NAN = float("nan")


@settings(deadline=None, max_examples=60)
@given(st.lists(st.one_of(st.just(NAN), st.floats(-10, 10)), max_size=12))
def test_nanstd_equals_the_standard_library(values):
    kept = [v for v in values if not math.isnan(v)]
    result = nanstd(torch.tensor(values, dtype=torch.float64)).item()
    if len(kept) < 2:
        assert math.isnan(result)
    else:
        assert result == pytest.approx(statistics.stdev(kept), abs=1e-9)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(-20, 20), min_size=1, max_size=12))
def test_effective_sample_size_equals_a_slow_loop(log_ratios):
    weights = [math.exp(x) for x in log_ratios]
    expected = math.fsum(weights) ** 2 / (len(weights) * math.fsum(w * w for w in weights))
    result = effective_sample_size(torch.tensor(log_ratios, dtype=torch.float64)).item()
    assert result == pytest.approx(expected, rel=1e-9)
    assert 0 < result <= 1 + 1e-12


def test_effective_sample_size_of_one_weight_that_counts_and_of_none():
    assert effective_sample_size(torch.tensor([300.0, -300.0, 0.0, 0.0])).item() == pytest.approx(0.25)
    assert effective_sample_size(torch.zeros(0)).isnan()
    assert effective_sample_size(torch.full((5,), -200.0)).item() == pytest.approx(1.0, abs=1e-5)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.floats(-10, 10), st.one_of(st.just(0.0), st.floats(0.01, 10))), max_size=12))
def test_masked_mean_by_weights_of_any_size_and_by_a_mask_equals_a_slow_loop(pairs):
    total = math.fsum(w for _, w in pairs)
    values = torch.tensor([v if w else NAN for v, w in pairs], dtype=torch.float64)
    weights = torch.tensor([w for _, w in pairs], dtype=torch.float64)
    expected = math.fsum(v * w for v, w in pairs) / total if total else 0.0
    assert masked_mean(values, weights).item() == pytest.approx(expected, abs=1e-9)
    assert masked_mean(values[None], weights[None] * 1e-6).item() == pytest.approx(expected, abs=1e-6)
    mask, kept = weights > 0, [v for v, w in pairs if w]
    assert masked_mean(values, mask).item() == pytest.approx(math.fsum(kept) / max(1, len(kept)), abs=1e-9)


def test_wilson_interval():
    """The bounds are the two solutions of |p - share| = z * sqrt(p (1 - p) / n)."""
    shares, counts = torch.tensor([0.0, 0.3, 1.0]), torch.tensor([10.0, 50.0, 4.0])
    for share, n, *ends in zip(shares.tolist(), counts.tolist(), *wilson_interval(shares, counts), strict=True):
        for end in map(float, ends):
            assert abs(end - share) == pytest.approx(1.96 * math.sqrt(max(0.0, end * (1 - end)) / n), abs=1e-4)
    assert torch.stack(wilson_interval(torch.tensor(math.nan), torch.tensor(0.0))).isnan().all()


def ngrams(ids: list[int]) -> list[tuple[int, ...]]:
    return [tuple(ids[i : i + NGRAM]) for i in range(len(ids) - NGRAM + 1)] or [tuple(ids)]


def test_repetition_and_overlap_of_short_sequences_are_exact():
    generator = torch.Generator().manual_seed(0)
    for length in (0, 1, 3, 4, 5, 12, 30):
        rows = [torch.randint(0, 3, (length,), generator=generator).tolist() for _ in range(4)]
        sketches = []
        for row in rows:
            sketch, repetition = ngram_statistics(torch.tensor(row, dtype=torch.int64))
            found = ngrams(row)
            assert repetition == pytest.approx(1 - len(set(found)) / len(found))
            assert len(sketch) == min(SKETCH_SIZE, len(set(found)))
            sketches.append(sketch)
        sets = [set(ngrams(row)) for row in rows]
        if max(map(len, sets)) < SKETCH_SIZE:
            distinct, total = len(set.union(*sets)), sum(map(len, sets))
            assert overlap(sketches) == pytest.approx((1 - distinct / total) * 4 / 3)


def test_a_sketch_estimates_the_overlap_of_long_sequences():
    """Half of 20,000 tokens are shared, so a third of all different n-grams would be doubles."""
    generator = torch.Generator().manual_seed(1)
    shared, *own = (torch.randint(0, 50_000, (10_000,), generator=generator) for _ in range(3))
    sketches = [ngram_statistics(torch.cat([shared, part]))[0] for part in own]
    assert len(sketches[0]) == SKETCH_SIZE and overlap(sketches) == pytest.approx(0.5, abs=0.25)
    assert overlap([ngram_statistics(part)[0] for part in own]) == 0.0


def test_sequences_have_different_hashes():
    rows = [[], [0], [0, 0], [1, 2], [2, 1], [1, 2, 3], [3, 2, 1], [1, 2, 0]]
    assert len({int(sequence_hash(torch.tensor(row, dtype=torch.int64))) for row in rows}) == len(rows)
