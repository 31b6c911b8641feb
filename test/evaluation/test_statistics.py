"""pass@k, maj@k and intervals, against enumeration of all subsets and published values."""

from __future__ import annotations

import math
import random
from itertools import combinations, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_rloo.evaluation.statistics import (
    best_at_k,
    maj_at_k,
    mcnemar_test,
    mean_interval,
    paired_binary_interval,
    paired_test,
    pass_at_k,
    sign_flip_test,
    student_quantile,
)

answers_and_scores = st.lists(st.tuples(st.sampled_from([None, "a", "b", "c", "d"]), st.floats(-2, 2)), min_size=1)
small = st.lists(st.tuples(st.sampled_from([None, "a", "b", "c"]), st.sampled_from([0.0, 1.0])), min_size=1, max_size=7)


def vote(answers, score_of):
    """Return the expected score of the majority answer, over fair draws among ties."""
    counts = {a: answers.count(a) for a in answers if a is not None}
    if not counts:
        return 0.0
    tied = [a for a in counts if counts[a] == max(counts.values())]
    return sum(map(score_of.__getitem__, tied)) / len(tied)


def maj_by_enumeration(answers, scores, k):
    score_of = {}
    for a in set(answers):
        own = [s for b, s in zip(answers, scores, strict=True) if a == b]
        score_of[a] = sum(own) / len(own)
    subsets = list(combinations(answers, k))
    return sum(vote(list(subset), score_of) for subset in subsets) / len(subsets)


@pytest.mark.parametrize("n", range(1, 9))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(n):
    for k in range(1, n + 1):
        subsets = list(combinations(range(n), k))
        expected = [sum(any(i < c for i in s) for s in subsets) / len(subsets) for c in range(n + 1)]
        torch.testing.assert_close(pass_at_k(torch.arange(n + 1), n, k), torch.tensor(expected).double())


def test_pass_at_k_has_the_closed_forms_and_is_stable():
    correct, total = torch.tensor([0, 3, 10]), torch.tensor([4, 10, 10])
    torch.testing.assert_close(pass_at_k(correct, total, 1), torch.tensor([0.0, 0.3, 1.0]).double())
    huge = pass_at_k(torch.tensor([1]), 100_000, 50_000).item()  # the binomials have 30,000 digits
    assert huge == pytest.approx(0.5, abs=1e-9)
    exact = 1 - math.comb(980, 500) / math.comb(1000, 500)
    assert pass_at_k(torch.tensor([20]), 1000, 500).item() == pytest.approx(exact, abs=1e-13)


def test_best_at_k_is_the_mean_maximum_of_subsets():
    scores = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    for k in range(1, 8):
        expected = torch.stack([scores[:, list(s)].amax(1) for s in combinations(range(7), k)]).double().mean(0)
        torch.testing.assert_close(best_at_k(scores, k), expected)
    right = (scores > 0.5).double()
    torch.testing.assert_close(best_at_k(right, 3), pass_at_k(right.sum(1), 7, 3))


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=12), st.randoms())
@settings(max_examples=60, deadline=None)
def test_best_at_k_grows_from_the_mean_to_the_maximum(scores, shuffler):
    row = torch.tensor([scores]).double()
    values = [best_at_k(row, k).item() for k in range(1, len(scores) + 1)]
    assert values[0] == pytest.approx(row.mean().item()) and values[-1] == pytest.approx(row.max().item())
    assert all(b >= a - 1e-9 for a, b in zip(values, values[1:], strict=False))
    shuffler.shuffle(scores)
    assert best_at_k(torch.tensor([scores]).double(), len(scores)).item() == pytest.approx(values[-1])


@given(small, st.data())
@settings(max_examples=150, deadline=None)
def test_maj_at_k_is_the_mean_vote_of_all_subsets(samples, data):
    answers, scores = zip(*samples, strict=True)
    k = data.draw(st.integers(1, len(samples)))
    assert maj_at_k(answers, scores, k) == pytest.approx(maj_by_enumeration(answers, scores, k), abs=1e-12)


@given(answers_and_scores.filter(lambda s: len(s) <= 20), st.data())
@settings(max_examples=60, deadline=None)
def test_maj_at_k_knows_neither_order_nor_names(samples, data):
    k = data.draw(st.integers(1, len(samples)))
    mixed = data.draw(st.permutations(samples))
    renamed = [(a and f"answer {a}", s) for a, s in mixed]
    value = maj_at_k(*zip(*samples, strict=True), k)
    assert maj_at_k(*zip(*renamed, strict=True), k) == pytest.approx(value, abs=1e-9)
    voters = [s for a, s in samples if a is not None]
    assert min([0.0, *voters]) - 1e-9 <= value <= max([0.0, *voters]) + 1e-9


def test_maj_at_k_of_one_is_the_mean_of_those_that_vote():
    assert maj_at_k(["a", None, "b", "a"], [1.0, 1.0, 0.0, 1.0], 1) == pytest.approx(2 / 4)  # no answer, no score


def test_maj_at_k_of_all_is_the_plain_majority():
    assert maj_at_k(list("aabbc"), [1, 1, 0, 0, 0], 5) == pytest.approx(0.5)  # a fair draw between a and b
    assert maj_at_k([None, None], [1, 1], 2) == 0.0
    assert maj_at_k(["a"] * 3 + ["b"] * 2, [0.5, 1.0, 0.0, 1, 1], 5) == pytest.approx(0.5)  # the answer's mean score


def test_maj_at_k_of_many_samples_agrees_with_drawn_subsets():
    rng = random.Random(0)
    answers = [rng.choice(["a"] * 5 + ["b"] * 4 + ["c"] * 2 + [None]) for _ in range(64)]
    scores = [float(a == "a") for a in answers]
    drawn = [vote(rng.sample(answers, 15), {"a": 1.0, "b": 0.0, "c": 0.0}) for _ in range(4000)]
    assert maj_at_k(answers, scores, 15) == pytest.approx(sum(drawn) / 4000, abs=0.03)
    assert maj_at_k([*"ab" * 500], [1.0, 0.0] * 500, 500) == pytest.approx(0.5, abs=1e-9)


@pytest.mark.parametrize("k", [0, 4])
def test_k_beyond_the_samples_is_refused(k):
    for call in (
        lambda: pass_at_k(torch.tensor([1]), 3, k),
        lambda: best_at_k(torch.zeros(1, 3), k),
        lambda: maj_at_k(["a"] * 3, [1.0] * 3, k),
    ):
        with pytest.raises(ValueError, match=f"k={k} must be between 1 and the 3 samples"):
            call()
    with pytest.raises(ValueError, match="must be between 0 and"):
        pass_at_k(torch.tensor([5]), 3, 1)
    with pytest.raises(ValueError, match="equal lengths, got 2 and 1"):
        maj_at_k(["a", "b"], [1.0], 1)


def test_wilson_interval_has_the_published_figures():
    none = mean_interval(torch.zeros(20))
    assert none == (0.0, 0.0, pytest.approx(0.16113, abs=1e-5))  # z^2 / (n + z^2)
    assert mean_interval(torch.ones(20)) == (1.0, pytest.approx(0.83887, abs=1e-5), 1.0)
    some = mean_interval(torch.tensor([1.0] * 81 + [0.0] * 182))  # Newcombe 1998, table I
    assert some.low == pytest.approx(0.2553, abs=1e-4) and some.high == pytest.approx(0.3662, abs=1e-4)
    assert mean_interval(torch.ones(1)).low == pytest.approx(0.2065, abs=1e-4)


def test_student_quantile_has_the_published_figures():
    table = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 10: 2.2281, 29: 2.0452, 120: 1.9799, 10_000: 1.9600}
    for df, value in table.items():
        assert student_quantile(0.975, df) == pytest.approx(value, abs=3e-4)
    assert student_quantile(0.995, 7) == pytest.approx(3.4995, abs=1e-4)


def test_values_beyond_shares_have_a_t_interval():
    values = torch.tensor([-1.0, 0.0, 1.0, 2.0, 3.0])
    interval = mean_interval(values)
    half = 2.776445 * values.double().std().item() / math.sqrt(5)
    assert interval == (1.0, pytest.approx(1 - half), pytest.approx(1 + half))
    for equal in (7.0, -0.1, 1.1, 0.1 + 0.2 + 1):  # equal values show no spread
        mean, low, high = mean_interval(torch.full((7,), equal).double())
        assert mean == pytest.approx(equal) and math.isnan(low) and math.isnan(high)
    assert all(math.isnan(end) for end in mean_interval(torch.tensor([0.3]))[1:])
    with pytest.raises(ValueError, match="empty"):
        mean_interval(torch.zeros(0))


def test_equal_shares_have_a_width_that_shrinks_with_the_draws():
    few, many = (mean_interval(torch.full((20,), 0.5), draws=draws) for draws in (1, 16))
    assert 0 < many.high - many.low < few.high - few.low < 0.5


@given(st.lists(st.integers(0, 1000).map(lambda n: n / 1000), min_size=2, max_size=30), st.floats(1, 32))
@settings(max_examples=100, deadline=None)
def test_intervals_of_shares_hold_the_mean_and_stay_inside(values, draws):
    mean, low, high = mean_interval(torch.tensor(values), draws=draws)
    assert 0 <= low <= mean + 1e-9 and mean - 1e-9 <= high <= 1 and low < high
    other = mean_interval(1 - torch.tensor(values), draws=draws)
    assert other.low == pytest.approx(1 - high, abs=1e-5) and other.high == pytest.approx(1 - low, abs=1e-5)


def test_rounding_does_not_hide_that_values_are_whole():
    assert mean_interval(torch.full((20,), 1 - 1e-15).double()) == mean_interval(torch.ones(20))


@pytest.mark.parametrize(("a", "b"), [(0.3, 0.3), (0.05, 2.0)])
def test_coverage_is_near_the_level_also_of_hard_tasks(a, b):
    """With 20 prompts of 4 samples, a t interval covers 73 % of the hard cases and a bootstrap 68 %."""
    torch.manual_seed(0)
    chance = torch.distributions.Beta(a, b).sample((600, 20))
    values = torch.binomial(torch.full_like(chance, 4.0), chance) / 4
    held = [low <= a / (a + b) <= high for _, low, high in (mean_interval(row, draws=4) for row in values)]
    assert 0.93 <= sum(held) / len(held) <= 0.99


@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, 0.5, 1.0])
@pytest.mark.parametrize("prompts", [2, 3, 7, 30])
def test_equal_shares_have_a_wide_interval(value, prompts):
    mean, low, high = mean_interval(torch.full((prompts,), value).double())
    assert low <= mean <= high and high - low > 0.3 / prompts**0.5


# Paired tests


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
    for call in (lambda: sign_flip_test(values), lambda: mean_interval(values)):
        with pytest.raises(ValueError, match="must be finite"):
            call()
