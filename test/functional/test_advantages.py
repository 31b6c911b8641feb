from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_rloo.functional import ESTIMATORS, leave_one_out

NAN = float("nan")


def slow_leave_one_out(rewards: list[float], groups: list[int]) -> list[float]:
    advantages = []
    for i, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        others = [
            r
            for j, (r, g) in enumerate(zip(rewards, groups, strict=True))
            if j != i and g == group and not math.isnan(r)
        ]
        advantages.append(0.0 if math.isnan(reward) or not others else reward - math.fsum(others) / len(others))
    return advantages


@st.composite
def batches(draw, min_rows: int = 0):
    """Rewards with abstentions, in groups of any sizes, members interleaved in any order."""
    n = draw(st.integers(min_rows, 24))
    reward = st.one_of(st.floats(-100, 100, width=32), st.sampled_from([0.0, 1.0, NAN]))
    rewards = draw(st.lists(reward, min_size=n, max_size=n))
    groups = draw(st.lists(st.integers(0, 5), min_size=n, max_size=n))
    return torch.tensor(rewards), torch.tensor(groups, dtype=torch.int64)


@settings(deadline=None, max_examples=60)
@given(batches())
def test_equals_a_slow_loop(batch):
    rewards, groups = batch
    expected = torch.tensor(slow_leave_one_out(rewards.tolist(), groups.tolist()))
    torch.testing.assert_close(leave_one_out(rewards, groups), expected, atol=1e-5, rtol=1e-5)


@settings(deadline=None, max_examples=60)
@given(batches(min_rows=1))
def test_sums_to_zero_in_every_group(batch):
    rewards, groups = batch
    advantages = leave_one_out(rewards, groups).double()
    sums = torch.zeros(6, dtype=torch.float64).index_add(0, groups, advantages)
    torch.testing.assert_close(sums, torch.zeros_like(sums), atol=1e-3, rtol=0)


@settings(deadline=None, max_examples=60)
@given(batches(min_rows=1), st.randoms(use_true_random=False))
def test_follows_a_permutation_of_the_rows(batch, random):
    rewards, groups = batch
    order = list(range(len(rewards)))
    random.shuffle(order)
    permuted = leave_one_out(rewards[order], groups[order])
    torch.testing.assert_close(permuted, leave_one_out(rewards, groups)[order], atol=1e-5, rtol=1e-5)


@settings(deadline=None, max_examples=60)
@given(batches(min_rows=1), st.lists(st.floats(-50, 50, width=32), min_size=6, max_size=6))
def test_a_shift_of_a_groups_rewards_changes_nothing(batch, shifts):
    rewards, groups = batch
    shifted = rewards.double() + torch.tensor(shifts, dtype=torch.float64)[groups]
    expected = leave_one_out(rewards.double(), groups)
    alone = torch.tensor([(~rewards[groups == g].isnan()).sum().item() < 2 for g in groups.tolist()])
    torch.testing.assert_close(leave_one_out(shifted, groups), expected, atol=1e-9, rtol=0)
    assert (leave_one_out(shifted, groups)[alone] == 0).all()


@settings(deadline=None, max_examples=60)
@given(batches(min_rows=1), st.floats(-8, 8, width=32))
def test_scales_with_the_rewards(batch, scale):
    rewards, groups = batch
    scaled = leave_one_out(rewards.double() * scale, groups)
    torch.testing.assert_close(scaled, leave_one_out(rewards.double(), groups) * scale, atol=1e-9, rtol=1e-9)


@settings(deadline=None, max_examples=60)
@given(st.floats(-(2.0**100), 2.0**100, width=32), st.integers(1, 40))
def test_equal_rewards_give_exactly_zero(reward, n):
    assert (leave_one_out(torch.full((n,), reward), torch.zeros(n, dtype=torch.int64)) == 0).all()


def test_seven_rewards_of_1000_1_give_exactly_zero():
    assert leave_one_out(torch.full((7,), 1000.1), torch.zeros(7, dtype=torch.int64)).tolist() == [0.0] * 7


@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1000.1, 1e-30])
def test_equal_rewards_in_float64_give_exactly_zero(reward):
    rewards = torch.full((7,), reward, dtype=torch.float64)
    assert leave_one_out(rewards, torch.zeros(7, dtype=torch.int64)).tolist() == [0.0] * 7


def test_an_abstaining_row_gets_zero_and_stays_out_of_the_baseline():
    rewards, groups = torch.tensor([3.0, NAN, 1.0, NAN, 5.0]), torch.tensor([0, 0, 0, 1, 1])
    assert leave_one_out(rewards, groups).tolist() == [2.0, 0.0, -2.0, 0.0, 0.0]


def test_groups_do_not_touch_each_other():
    rewards, groups = torch.tensor([1.0, 0.0, 7.0, 9.0]), torch.tensor([0, 0, 1, 1])
    changed = rewards + torch.tensor([0.0, 0.0, 100.0, -3.0])
    assert torch.equal(leave_one_out(rewards, groups)[:2], leave_one_out(changed, groups)[:2])


def test_a_large_reward_in_one_group_costs_another_no_precision():
    rewards, groups = torch.tensor([1e30, -1e30, 0.1, 0.2]), torch.tensor([0, 0, 1, 1])
    torch.testing.assert_close(leave_one_out(rewards, groups)[2:], torch.tensor([-0.1, 0.1]), atol=1e-7, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_keeps_the_dtype_and_takes_no_rows(dtype):
    assert leave_one_out(torch.ones(2, dtype=dtype), torch.tensor([0, 0])).dtype == dtype
    assert leave_one_out(torch.ones(0, dtype=dtype), torch.zeros(0, dtype=torch.int64)).shape == (0,)


@settings(deadline=None, max_examples=60)
@given(batches(min_rows=1))
def test_every_registered_estimator_keeps_the_contract(batch):
    rewards, groups = batch
    before = rewards.clone()
    for name, estimator in ESTIMATORS.items():
        advantages = estimator(rewards, groups)
        assert advantages.shape == rewards.shape and advantages.dtype == rewards.dtype, name
        assert advantages.isfinite().all() and (advantages[rewards.isnan()] == 0).all(), name
        assert torch.equal(rewards.nan_to_num(123.0), before.nan_to_num(123.0)), f"{name} changed its input"
