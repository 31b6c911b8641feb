from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_rloo.functional.rewards import (
    Moments,
    calibrate_scores,
    column_moments,
    combine_rewards,
    decay_moments,
    mean_overlap,
    merge_moments,
    normalize_scores,
)
from torchrl_rloo.functional.statistics import group_ranges, has_signal

NAN = float("nan")


def slow_combine(rewards: list[list[float]], weights: list[float], clip: tuple[float, float] | None) -> list[float]:
    result = []
    for row in rewards:
        answered = [w * r for w, r in zip(weights, row, strict=True) if not math.isnan(r)]
        total = math.fsum(answered) if answered else NAN
        result.append(total if clip is None or math.isnan(total) else min(max(total, clip[0]), clip[1]))
    return result


@st.composite
def scores(draw):
    functions, rows = draw(st.integers(1, 4)), draw(st.integers(0, 6))
    score = st.one_of(st.just(NAN), st.floats(-5, 5))
    rewards = draw(st.lists(st.lists(score, min_size=functions, max_size=functions), min_size=rows, max_size=rows))
    weights = draw(st.lists(st.floats(-2, 2), min_size=functions, max_size=functions))
    return rewards, weights


@settings(deadline=None, max_examples=60)
@given(scores(), st.sampled_from([None, (-1.0, 1.0), (0.0, 3.0), (-math.inf, 0.5)]))
def test_equals_a_slow_loop(case, clip):
    rewards, weights = case
    result = combine_rewards(torch.tensor(rewards, dtype=torch.float64).reshape(-1, len(weights)), weights, clip)
    expected = torch.tensor(slow_combine(rewards, weights, clip), dtype=torch.float64)
    torch.testing.assert_close(result, expected, atol=1e-9, rtol=0, equal_nan=True)


SCORES = st.lists(st.one_of(st.just(NAN), st.floats(-100, 100, width=32)), min_size=1, max_size=12)


@settings(deadline=None, max_examples=60)
@given(SCORES, st.data())
def test_moments_are_those_of_all_scores_however_they_are_split(scores: list[float], data) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(scores)), max_size=4)))
    order = data.draw(st.permutations(scores))
    bounds = [0, *cuts, len(scores)]
    moments = Moments.zeros(1)
    for a, b in zip(bounds, bounds[1:], strict=False):
        moments = merge_moments(moments, column_moments(torch.tensor(order[a:b]).reshape(-1, 1)))
    known = [s for s in scores if s == s]
    assert moments.count.item() == len(known)
    if known:
        assert moments.mean.item() == pytest.approx(statistics.fmean(known), abs=1e-9)
        assert moments.std.item() == pytest.approx(statistics.pstdev(known), abs=1e-9)


def test_a_large_mean_does_not_drown_the_spread() -> None:
    values = torch.tensor([1e9 + 1, 1e9 + 2, 1e9 + 3], dtype=torch.float64)
    moments = merge_moments(column_moments(values[:1, None]), column_moments(values[1:, None]))
    assert moments.std.item() == pytest.approx(math.sqrt(2 / 3), rel=1e-6)


def test_forgetting_changes_weights_only() -> None:
    old = column_moments(torch.tensor([[0.0], [2.0]]))
    half = decay_moments(old, 0.5)
    assert (half.mean, half.std, half.count) == (old.mean, old.std, 1.0)
    merged = merge_moments(half, column_moments(torch.tensor([[4.0]])))
    assert merged.mean.item() == pytest.approx((0.5 * 0 + 0.5 * 2 + 4) / 2)


def test_each_function_is_divided_by_its_own_spread() -> None:
    seen = torch.tensor([[0.0, 100.0, 5.0], [1.0, 300.0, 5.0]])
    moments = column_moments(seen)
    scores = torch.tensor([[1.0, 200.0, 5.0], [NAN, 100.0, 4.0]])
    shaped = normalize_scores(scores, moments, center=False, min_count=2, epsilon=1e-9)
    expected = torch.tensor([[2.0, 2.0, 5.0], [NAN, 1.0, 4.0]])
    torch.testing.assert_close(shaped, expected, equal_nan=True)
    centred = normalize_scores(scores, moments, center=True, min_count=2, epsilon=1e-9)
    torch.testing.assert_close(centred, torch.tensor([[1.0, 0.0, 0.0], [NAN, -1.0, -1.0]]), equal_nan=True)
    early = normalize_scores(scores, moments, center=True, min_count=3, epsilon=1e-9)
    torch.testing.assert_close(early, scores, equal_nan=True)


def test_rounding_is_no_scale() -> None:
    moments = column_moments(torch.full((7, 1), 1000.1).double() + torch.arange(7)[:, None] * 1e-5)
    assert normalize_scores(torch.tensor([[1000.1]]), moments, center=False, min_count=2, epsilon=1e-9).item() < 1001


def test_calibration() -> None:
    scores = torch.tensor([2.0, -4.0, NAN])
    torch.testing.assert_close(calibrate_scores(scores, 2.0), torch.tensor([1.0, -2.0, NAN]), equal_nan=True)
    shaped = calibrate_scores(scores, 2.0, bias=1.0, sigmoid=True)
    expected = torch.tensor([1 / (1 + math.exp(-2.0)), 1 / (1 + math.exp(1.0)), NAN])
    torch.testing.assert_close(shaped, expected, equal_nan=True)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.one_of(st.just(NAN), st.sampled_from([0.0, 0.5, 1.0]))), min_size=1),
    st.sampled_from([0.0, 0.5, 1.0]),
)
def test_signal_against_a_loop(members: list, tolerance: float) -> None:
    ids = sorted({g for g, _ in members})
    groups = torch.tensor([ids.index(g) for g, _ in members])
    returns = torch.tensor([r for _, r in members])
    signal = has_signal(group_ranges(returns, groups), tolerance)
    for k, group in enumerate(ids):
        known = [r for g, r in members if g == group and r == r]
        assert bool(signal[k]) == (len(known) > 1 and max(known) - min(known) > tolerance)


def test_one_of_several_returns_that_differs_is_a_signal() -> None:
    returns = torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, 0.0], [1.0, 0.0], [1.0, NAN], [1.0, 3.0]])
    assert has_signal(group_ranges(returns, torch.tensor([0, 0, 1, 1, 2, 2]))).tolist() == [True, False, False]


def test_overlap_is_the_mean_bhattacharyya_coefficient():
    """Compare with the integral of the root of both densities, on a grid."""
    known, step = [(0.0, 1.0), (1.5, 0.3), (-2.0, 2.0)], 1e-3

    def density(x: float, mean: float, std: float) -> float:
        return math.exp(-(((x - mean) / std) ** 2) / 2) / (std * math.sqrt(2 * math.pi))

    for mean, std in ((0.0, 1.0), (4.0, 0.2), (-1.0, 3.0)):
        expected = sum(
            math.sqrt(density(x, mean, std) * density(x, m, s)) * step
            for m, s in known
            for x in (-20 + step * k for k in range(40_000))
        ) / len(known)
        found = mean_overlap(torch.tensor([mean]), torch.tensor([std]), *torch.tensor(known).unbind(-1))
        assert found.item() == pytest.approx(expected, rel=1e-3, abs=1e-6)
