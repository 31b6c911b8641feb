from __future__ import annotations

import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_rloo.rewards.lengths import Length, LengthBudget, RepetitionPenalty, SoftOverlong


@given(st.integers(1, 50).flatmap(lambda most: st.tuples(st.just(most), st.integers(0, most))))
def test_falls_from_zero_to_minus_one_in_equal_steps(settings):
    most, cache = settings
    rewards = SoftOverlong(most, cache)(["?"] * 60, ["x"] * 60, [[1] * n for n in range(60)])
    assert rewards[: most - cache + 1] == [0] * (most - cache + 1)
    assert rewards[most + 1 :] == [-1] * (59 - most)
    if cache:
        fall = rewards[most - cache : most + 1]
        assert fall == pytest.approx([-step / cache for step in range(cache + 1)])


LENGTHS = st.lists(st.integers(0, 40), max_size=6)


def ids_of(lengths):
    return [[1] * n for n in lengths]


@given(LENGTHS, st.integers(0, 40), st.floats(0, 1), st.booleans())
def test_length_costs_what_deviates_from_the_target(lengths, target, cost, free):
    rewards = Length(target, cost, free_if_shorter=free)(["?"] * len(lengths), ["x"] * len(lengths), ids_of(lengths))
    expected = [-cost * (max(n - target, 0) if free else abs(n - target)) for n in lengths]
    assert rewards == pytest.approx(expected) and all(reward <= 0 for reward in rewards)


def test_length_without_settings_is_linear():
    assert Length()(["?"] * 2, ["x"] * 2, [[], [1] * 100]) == pytest.approx([0, -0.03])


def test_targets_from_a_column():
    reward = Length("tokens", 0.1)
    assert reward(["?"] * 3, ["x"] * 3, ids_of([5, 5, 5]), tokens=[5, 8, None]) == [0, pytest.approx(-0.3), None]
    with pytest.raises(KeyError, match="length requires column 'tokens'; the rows have \\['a'\\]"):
        reward(["?"], ["x"], [[1]], a=[1])


def right(prompts, completions, completion_ids, **columns):
    return [None if text == "?" else float(text) for text in completions]


@given(LENGTHS, st.integers(0, 40), st.floats(0, 1), st.floats(0, 1))
def test_length_budget_scales_the_score(lengths, budget, cost, at_budget):
    reward = LengthBudget(right, budget, cost, at_budget)
    for text, score in (("1", 1.0), ("0", 0.0), ("0.5", 0.5)):
        factors = [min(max(cost * (budget - n) + at_budget, 0), 1) for n in lengths]
        rewards = reward(["?"] * len(lengths), [text] * len(lengths), ids_of(lengths))
        assert rewards == pytest.approx([score * factor for factor in factors])
    assert reward(["?"], ["?"], [[1]]) == [None]


def test_budgets_from_a_column():
    reward = LengthBudget(right, "tokens", 0.1)
    assert reward(["?"] * 2, ["1"] * 2, ids_of([3, 3]), tokens=[5, None]) == [pytest.approx(0.7), None]
    assert reward.__name__ == "length_budget_right"
    assert pickle.loads(pickle.dumps(reward))(["?"], ["1"], [[1]], tokens=[1]) == [0.5]


@pytest.mark.parametrize(
    ("kind", "settings", "named"),
    [
        (SoftOverlong, {"max_completion_len": 0, "soft_punish_cache": 0}, "max_completion_len=0"),
        (SoftOverlong, {"max_completion_len": 9, "soft_punish_cache": -1}, "cache=-1"),
        (SoftOverlong, {"max_completion_len": 9, "soft_punish_cache": 10}, "cache=10"),
        (RepetitionPenalty, {"ngram_size": 0}, "ngram_size=0"),
        (RepetitionPenalty, {"max_penalty": 0.5}, "penalty=0.5"),
        (RepetitionPenalty, {"max_penalty": math.nan}, "penalty=nan"),
        (Length, {"target": -1}, "target=-1"),
        (Length, {"target": ""}, "target=''"),
        (Length, {"cost": -0.1}, "cost=-0.1"),
        (Length, {"cost": math.nan}, "cost=nan"),
        (LengthBudget, {"function": right, "budget": math.inf}, "budget=inf"),
        (LengthBudget, {"function": right, "budget": 5, "cost": math.inf}, "cost=inf"),
        (LengthBudget, {"function": right, "budget": 5, "at_budget": 1.1}, "at_budget=1.1"),
    ],
)
def test_settings_out_of_range(kind, settings, named):
    with pytest.raises(ValueError, match=named):
        kind(**settings)


@given(st.lists(st.integers(0, 2), max_size=12), st.integers(1, 4))
def test_the_share_of_ngrams_seen_before(ids, size):
    seen, repeated, total = [], 0, 0
    for start in range(len(ids)):
        ngram = ids[start : start + size]
        if len(ngram) == size:
            total, repeated = total + 1, repeated + (ngram in seen)
            seen.append(ngram)
    expected = -2.0 * repeated / total if total else 0.0
    assert RepetitionPenalty(size, -2.0)(["?"], ["x"], [ids]) == pytest.approx([expected])
