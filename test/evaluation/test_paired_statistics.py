"""Paired tests, against enumeration, closed forms and each other."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_rloo.evaluation.statistics import mcnemar_test, paired_binary_interval, paired_test, sign_flip_test


def flips(better: int, worse: int, same: int = 0) -> torch.Tensor:
    return torch.tensor([1.0] * better + [-1.0] * worse + [0.0] * same)


@pytest.mark.parametrize(("better", "worse"), [(0, 0), (1, 0), (5, 0), (3, 3), (2, 9), (7, 4)])
def test_mcnemar_is_the_binomial_and_the_sign_flip_test(better, worse):
    n = better + worse
    extreme = [k for k in range(n + 1) if abs(2 * k - n) >= abs(better - worse)]
    expected = sum(math.comb(n, k) for k in extreme) / 2**n
    assert mcnemar_test(better, worse) == mcnemar_test(worse, better) == pytest.approx(expected)
    assert sign_flip_test(flips(better, worse, 3)) == (pytest.approx(expected), 0.0)


def test_mcnemar_of_many_prompts_is_exact():
    assert mcnemar_test(1000, 0) == 2.0**-999
    corrected = (520 - 480 - 1) / math.sqrt(1000)  # the normal approximation
    assert mcnemar_test(520, 480) == pytest.approx(math.erfc(corrected / math.sqrt(2)), abs=1e-3)


@given(st.lists(st.floats(-3, 3).map(lambda x: round(8 * x) / 8), min_size=1, max_size=8))
@settings(max_examples=80, deadline=None)
def test_sign_flips_are_all_tried(differences):
    total = abs(sum(differences))
    sums = [abs(sum(s * d for s, d in zip(signs, differences, strict=True))) for signs in
            product((-1, 1), repeat=len(differences))]  # fmt: skip
    expected = sum(s >= total - 1e-6 for s in sums) / len(sums)
    assert sign_flip_test(torch.tensor(differences))[0] == pytest.approx(expected)


def test_drawn_sign_patterns_agree_with_the_exact_test():
    p, error = sign_flip_test(flips(22, 10, 5))
    assert error > 0 and abs(p - mcnemar_test(22, 10)) < 4 * error
    assert sign_flip_test(flips(22, 10)) == sign_flip_test(flips(22, 10)) != sign_flip_test(flips(22, 10), seed=1)


def test_p_values_are_uniform_when_nothing_differs():
    generator = torch.Generator().manual_seed(0)
    p = [sign_flip_test(torch.randn(12, generator=generator))[0] for _ in range(400)]
    assert 0.02 <= sum(v <= 0.05 for v in p) / 400 <= 0.085 and 0.42 <= sum(v <= 0.5 for v in p) / 400 <= 0.58


def test_interval_of_binary_pairs_is_that_of_bonett_and_price():
    low, high = paired_binary_interval(better=12, worse=3, total=50)
    up, down = 13 / 52, 4 / 52
    half = 1.959964 * math.sqrt((up + down - (up - down) ** 2) / 52)
    assert (low, high) == (pytest.approx(up - down - half), pytest.approx(up - down + half))
    none = paired_binary_interval(0, 0, 20)
    assert none[0] == -none[1] and 0.1 < none[1] < 0.15  # no prompt changed, but the interval has a width
    assert paired_binary_interval(3, 0, 3)[1] <= 1.0


def test_paired_test_of_binary_values():
    first, second = torch.tensor([0, 0, 0, 1, 1, 0.0]), torch.tensor([1, 1, 0, 1, 0, 1.0])
    test = paired_test(first, second)
    assert (test.difference, test.better, test.worse) == (pytest.approx(2 / 6), 3, 1)
    assert test.p_value == mcnemar_test(3, 1) and test.p_error == 0.0 and test.low < 0 < test.difference < test.high
    back = paired_test(second, first)
    assert back.p_value == test.p_value and (back.low, back.high) == (pytest.approx(-test.high), -test.low)


def test_paired_test_of_other_values_has_a_t_interval():
    first = torch.tensor([0.25, 0.5, 0.0, 1.0])
    difference = torch.tensor([0.5, 0.25, 0.25, 0.0]).double()
    test = paired_test(first, first + difference)
    half = 3.182446 * difference.std().item() / 2
    assert (test.low, test.high) == (pytest.approx(0.25 - half), pytest.approx(0.25 + half))
    assert test.p_value == pytest.approx(0.25)  # 2 of the 8 sign patterns of the three that differ
    assert paired_test(first, first).p_value == 1.0
    assert math.isnan(paired_test(first[:1], first[:1] + 0.1).low)


def test_other_shapes_are_refused():
    for first, second in ((torch.zeros(2), torch.zeros(3)), (torch.zeros(0), torch.zeros(0))):
        with pytest.raises(ValueError, match="must have equal shapes"):
            paired_test(first, second)


@pytest.mark.parametrize("first", [[0.25, 0.5], [0.1, 0.2], [0.5] * 6, [0.25] * 3 + [0.5], [0.7, 0.1, 0.4]])
@pytest.mark.parametrize("gain", [0.0, 0.25, 0.3, -0.1, 1e-3])
def test_equal_differences_have_an_interval_of_some_width_or_none(first, gain):
    first = torch.tensor(first).double()
    test = paired_test(first, first + gain)
    inside = bool(((first + gain >= 0) & (first + gain <= 1)).all())
    assert math.isnan(test.low) == math.isnan(test.high) == (not inside)
    if inside:
        assert test.low < gain < test.high and test.high - test.low > 0.5 / len(first)
    scaled = paired_test(10 * first, 10 * (first + gain))  # no bounds are known of other scores
    assert math.isnan(scaled.low) and math.isnan(scaled.high) and scaled.p_value == test.p_value


@pytest.mark.parametrize("swap", [False, True])
def test_scores_are_shares_only_if_those_of_both_policies_are(swap):
    shares, others = torch.tensor([0.25, 0.5, 0.75]), torch.tensor([1.25, 1.5, 1.75])
    test = paired_test(*((others, shares) if swap else (shares, others)))
    assert math.isnan(test.low) and math.isnan(test.high)


def test_equal_differences_have_the_binary_interval_of_as_many_changes():
    test = paired_test(torch.tensor([0.5, 0.25, 0.75, 0.5]), torch.tensor([0.75, 0.5, 1.0, 0.75]))
    assert (test.low, test.high) == paired_binary_interval(1, 0, 4)


# differences of a prompt, and their probabilities: many samples of few prompts have equal differences
RARE = {"gain": ([0.0, 0.5], [0.9, 0.1]), "loss": ([0.0, -0.25], [0.8, 0.2]), "shift": ([0.25, 0.5], [0.9, 0.1])}
RARE |= {"both": ([0.0, 0.5, -0.5], [0.8, 0.1, 0.1]), "always": ([0.25], [1.0])}


@pytest.mark.parametrize("prompts", [2, 4, 8])
@pytest.mark.parametrize("kind", RARE)
def test_intervals_cover_the_difference_where_samples_often_agree(kind, prompts):
    values, chances = (torch.tensor(numbers).double() for numbers in RARE[kind])
    drawn = values[torch.multinomial(chances, prompts * 200, True, generator=torch.Generator().manual_seed(0))]
    first = (-values.min()).clamp(min=0).expand(prompts)
    tests = [paired_test(first, first + difference) for difference in drawn.view(200, prompts)]
    truth = float(values @ chances)
    assert sum(test.low <= truth <= test.high for test in tests) >= 0.95 * 200 - 2 * math.sqrt(200 * 0.95 * 0.05)
    assert all(test.high - test.low > 1e-6 for test in tests)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused(bad):
    values = torch.tensor([0.5, bad, 1.0])
    for call in (lambda: paired_test(values, values), lambda: paired_test(torch.ones(3), values)):
        with pytest.raises(ValueError, match="must be finite"):
            call()
    with pytest.raises(ValueError, match="must be finite"):
        sign_flip_test(values)
