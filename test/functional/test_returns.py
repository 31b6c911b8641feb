from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrl.objectives.utils import _clip_value_loss
from torchrl.objectives.value.functional import generalized_advantage_estimate

from torchrl_rloo.functional.returns import (
    clipped_value_loss,
    explained_variance,
    gae,
    rewards_to_go,
    spread_turns,
    turn_index,
    turn_rewards,
)


def slow_rewards_to_go(rewards: list[float], discount: float) -> list[float]:
    return [sum(discount ** (s - t) * rewards[s] for s in range(t, len(rewards))) for t in range(len(rewards))]


@settings(deadline=None, max_examples=80)
@given(st.data(), st.sampled_from([0.0, 0.3, 0.9, 1.0]))
def test_rewards_to_go_equal_a_slow_loop(data, discount):
    lengths = data.draw(st.lists(st.integers(0, 20), max_size=4))
    width = max(lengths, default=0) + data.draw(st.integers(0, 2))
    rows = [data.draw(st.lists(st.floats(-5, 5, width=32), min_size=n, max_size=n)) for n in lengths]
    rewards = torch.full((len(rows), width), float("nan"), dtype=torch.float64)  # values outside the mask are not read
    expected = torch.zeros(len(rows), width, dtype=torch.float64)
    for i, row in enumerate(rows):
        rewards[i, : len(row)] = torch.tensor(row, dtype=torch.float64)
        expected[i, : len(row)] = torch.tensor(slow_rewards_to_go(row, discount), dtype=torch.float64)
    mask = torch.arange(width) < torch.tensor(lengths, dtype=torch.int64)[:, None]
    torch.testing.assert_close(rewards_to_go(rewards, mask, discount), expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("discount", [1.0, 0.9])
def test_rewards_to_go_pass_gradcheck_and_keep_the_dtype(discount):
    rewards = torch.randn(2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    mask = torch.arange(5) < torch.tensor([[5], [3]])
    assert torch.autograd.gradcheck(lambda r: rewards_to_go(r, mask, discount), (rewards,))
    assert rewards_to_go(rewards.float(), mask, discount).dtype == torch.float32


def slow_turns(mask: list[bool]) -> list[int]:
    turns, turn = [], -1
    for is_action, run in itertools.groupby(mask):
        turn += is_action
        turns += [turn if is_action else -1 for _ in run]
    return turns


@settings(deadline=None, max_examples=80)
@given(st.integers(1, 12).flatmap(lambda t: st.lists(st.lists(st.booleans(), min_size=t, max_size=t), min_size=1)))
def test_turns_are_the_maximal_runs_of_action_tokens(masks):
    turns = turn_index(torch.tensor(masks))
    assert turns.tolist() == [slow_turns(mask) for mask in masks] and turns.dtype == torch.int64


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_turn_rewards_are_sums_over_turns_and_spread_back(data):
    width = data.draw(st.integers(1, 12))
    masks = data.draw(st.lists(st.lists(st.booleans(), min_size=width, max_size=width), min_size=1, max_size=4))
    rewards = torch.arange(float(len(masks) * width)).reshape(-1, width)
    turns = turn_index(torch.tensor(masks))
    earned, mask = turn_rewards(rewards, turns)
    for i, row in enumerate(masks):
        of_row = slow_turns(row)
        expected = [
            sum(float(r) for r, t in zip(rewards[i], of_row, strict=True) if t == k) for k in range(max(of_row) + 1)
        ]
        assert earned[i][mask[i]].tolist() == expected and mask[i].sum() == len(expected)
        spread = spread_turns(earned, turns)[i].tolist()
        assert spread == [expected[t] if t >= 0 else 0.0 for t in of_row]
    assert (earned[~mask] == 0).all()


def test_no_action_tokens_have_no_turns():
    turns = turn_index(torch.zeros(2, 3, dtype=torch.bool))
    earned, mask = turn_rewards(torch.ones(2, 3), turns)
    assert earned.shape == mask.shape == (2, 0)
    assert spread_turns(earned, turns).tolist() == [[0.0] * 3] * 2
    earned, mask = turn_rewards(torch.ones(2, 0), torch.zeros(2, 0, dtype=torch.int64))
    assert earned.shape == mask.shape == (2, 0) and rewards_to_go(earned, mask).shape == (2, 0)
    assert [values.shape for values in gae(earned, earned, mask)] == [(2, 0)] * 2


def random_batch(lengths: list[int], seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    rewards, values = (torch.randn(mask.shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return rewards, values, mask


def slow(rewards: list[float], values: list[float], discount: float, lam: float) -> list[float]:
    """Compute each advantage as an explicit sum of all future errors."""
    following = [*values[1:], 0.0][: len(values)]
    deltas = [r + discount * n - v for r, v, n in zip(rewards, values, following, strict=True)]
    return [sum((discount * lam) ** (k - t) * deltas[k] for k in range(t, len(deltas))) for t in range(len(deltas))]


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=4).filter(any),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(0, 9),
)
def test_advantages_equal_a_slow_loop(lengths, discount, lam, seed):
    rewards, values, mask = random_batch(lengths, seed)
    advantages, returns = gae(rewards, values, mask, discount, lam)
    for i, n in enumerate(lengths):
        expected = slow(rewards[i, :n].tolist(), values[i, :n].tolist(), discount, lam)
        assert advantages[i, :n].tolist() == pytest.approx(expected, abs=1e-12)
        sums = [a + v for a, v in zip(expected, values[i, :n].tolist(), strict=True)]
        assert returns[i, :n].tolist() == pytest.approx(sums, abs=1e-12)
    assert (advantages[~mask] == 0).all() and (returns[~mask] == 0).all()


def test_it_is_torchrls_where_that_applies():
    rewards, values, _ = random_batch([6, 6])
    done = torch.zeros(2, 6, 1, dtype=torch.bool)
    done[:, -1] = True
    following = torch.cat([values[:, 1:], torch.zeros(2, 1, dtype=torch.float64)], 1)
    theirs, targets = generalized_advantage_estimate(
        0.97, 0.9, values[..., None], following[..., None], rewards[..., None], done
    )
    ours, returns = gae(rewards, values, torch.ones(2, 6, dtype=torch.bool), 0.97, 0.9)
    torch.testing.assert_close(ours, theirs[..., 0], rtol=1e-5, atol=1e-5)  # TorchRL keeps its factors in float32
    torch.testing.assert_close(returns, targets[..., 0], rtol=1e-5, atol=1e-5)


def test_values_beyond_a_row_are_never_read():
    rewards, values, mask = random_batch([4, 2])
    expected = gae(rewards, values, mask)
    rewards[~mask], values[~mask] = torch.nan, torch.inf
    for ours, theirs in zip(gae(rewards, values, mask), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


NUMBERS = st.lists(st.tuples(*[st.floats(-3, 3)] * 3), min_size=1, max_size=6)


@settings(deadline=None, max_examples=60)
@given(NUMBERS, st.one_of(st.none(), st.floats(0.01, 2)))
def test_the_loss_equals_a_slow_loop(triples, epsilon):
    expected = []
    for v, old, target in triples:
        clipped = v if epsilon is None else min(max(v, old - epsilon), old + epsilon)
        expected.append(max((v - target) ** 2, (clipped - target) ** 2) / 2)
    v, old, target = torch.tensor(triples, dtype=torch.float64).T
    assert clipped_value_loss(v, old, target, epsilon).tolist() == pytest.approx(expected, abs=1e-12)


def test_the_value_loss_is_half_that_of_torchrl():
    values, old, targets = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))
    theirs, _ = _clip_value_loss(old, values, torch.tensor(0.2), targets, (values - targets).square(), "l2")
    torch.testing.assert_close(clipped_value_loss(values, old, targets, 0.2), theirs / 2)


def test_gradients_are_those_of_finite_differences():
    values = torch.tensor([[0.1, 0.9, -0.7, 0.3]], dtype=torch.float64, requires_grad=True)
    old = torch.zeros(1, 4, dtype=torch.float64)
    targets = torch.tensor([[1.0, 1.1, 1.0, -2.0]], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda v: clipped_value_loss(v, old, targets, 0.2), values)


@settings(deadline=None, max_examples=60)
@given(NUMBERS)
def test_explained_variance_equals_a_slow_loop(triples):
    values, targets, _ = zip(*triples, strict=True)

    def variance(numbers):
        mean = math.fsum(numbers) / len(numbers)
        return math.fsum((n - mean) ** 2 for n in numbers) / len(numbers)

    tensors = [torch.tensor(numbers, dtype=torch.float64) for numbers in (values, targets)]
    result = float(explained_variance(*tensors))
    if variance(targets) > 1e-6:
        errors = [t - v for v, t in zip(values, targets, strict=True)]
        assert result == pytest.approx(1 - variance(errors) / variance(targets), rel=1e-6, abs=1e-9)


def test_explained_variance_of_known_estimates():
    targets = torch.tensor([1.0, 2.0, 4.0])
    assert explained_variance(targets, targets) == 1
    assert explained_variance(targets + 3, targets) == 1
    assert explained_variance(torch.zeros(3), targets) == 0
    assert explained_variance(-targets, targets) == -3
    assert explained_variance(torch.rand(3), torch.ones(3)).isnan()
    assert explained_variance(targets[:0], targets[:0]).isnan()
