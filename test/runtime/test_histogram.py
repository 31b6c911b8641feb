"""Histogram of durations."""

from __future__ import annotations

import math
import random

import pytest

from torchrl_rloo.runtime.clock import Histogram


def filled(values) -> Histogram:
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    return histogram


@pytest.mark.parametrize("q", [0.0, 0.1, 0.5, 0.9, 0.99, 1.0])
def test_quantiles_are_right_to_six_percent(q):
    rng = random.Random(0)
    values = sorted(rng.lognormvariate(-3.0, 2.0) for _ in range(5001))
    exact = values[max(0, math.ceil(q * len(values)) - 1)]
    assert filled(values).quantile(q) == pytest.approx(exact, rel=0.06)
    assert len(filled(values).buckets) < 200


def test_merging_is_adding():
    values = [10.0**k for k in range(-9, 5)]
    one, two, both = filled(values[:6]), filled(values[6:]), filled(values)
    one.merge(two)
    assert (one.buckets, one.n, one.longest) == (both.buckets, both.n, both.longest)
    assert one.total == pytest.approx(both.total)


def test_a_duration_counts_as_often_as_said():
    histogram = Histogram()
    histogram.add(0.1, 3)
    histogram.add(10.0)
    assert histogram.n == 4 and histogram.total == pytest.approx(10.3)
    assert histogram.quantile(0.75) == pytest.approx(0.1, rel=0.06) and histogram.quantile(0.76) == 10.0


def test_no_duration_has_no_quantile():
    assert math.isnan(Histogram().quantile(0.5))
    with pytest.raises(ValueError, match="q=1.5"):
        Histogram().quantile(1.5)
