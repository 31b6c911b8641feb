from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_rloo.functional.returns import rewards_to_go, spread_turns, turn_index, turn_rewards


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
