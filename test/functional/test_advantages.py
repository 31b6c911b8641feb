from __future__ import annotations

import ast
import math
import statistics

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from torchrl_rloo.functional.advantages import (
    ESTIMATORS,
    RewardStd,
    Whiten,
    group_centered,
    group_normalized,
    leave_one_out,
    mean_normalized,
    normalize_then_sum,
    whiten,
)

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
    """Sample rewards with abstentions, in groups of any size whose members are interleaved in any order."""
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
@given(batches(min_rows=1), st.floats(-8, 8, width=32))
def test_scales_with_the_rewards(batch, scale):
    rewards, groups = batch
    scaled = leave_one_out(rewards.double() * scale, groups)
    torch.testing.assert_close(scaled, leave_one_out(rewards.double(), groups) * scale, atol=1e-9, rtol=1e-9)


@settings(deadline=None, max_examples=60)
@given(st.floats(-(2.0**100), 2.0**100, width=32), st.integers(1, 40))
def test_equal_rewards_give_exactly_zero(reward, n):
    assert (leave_one_out(torch.full((n,), reward), torch.zeros(n, dtype=torch.int64)) == 0).all()


def test_an_abstaining_row_gets_zero_and_stays_out_of_the_baseline():
    rewards, groups = torch.tensor([3.0, NAN, 1.0, NAN, 5.0]), torch.tensor([0, 0, 0, 1, 1])
    assert leave_one_out(rewards, groups).tolist() == [2.0, 0.0, -2.0, 0.0, 0.0]


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


# all estimators


def slow_estimator(name: str, rewards: list[float], groups: list[int]) -> list[float]:
    """Compute each method's formula for one row at a time, from the list of rewards of its group."""
    advantages = []
    for reward, group in zip(rewards, groups, strict=True):
        of_group = [r for r, g in zip(rewards, groups, strict=True) if g == group and not math.isnan(r)]
        if math.isnan(reward):
            advantages.append(0.0)
        elif name == "reinforce":
            advantages.append(reward)
        elif len(of_group) < 2:
            advantages.append(0.0)
        elif name == "rloo":
            advantages.append(reward - (math.fsum(of_group) - reward) / (len(of_group) - 1))
        elif name == "dr_grpo":
            advantages.append(reward - statistics.fmean(of_group))
        elif name == "grpo":
            std = statistics.stdev(of_group)
            noise = std <= 1e-6 * max(map(abs, of_group))
            advantages.append(0.0 if noise else (reward - statistics.fmean(of_group)) / (std + 1e-4))
        elif name == "maxrl":
            size = statistics.fmean(map(abs, of_group))
            advantages.append((reward - statistics.fmean(of_group)) / size if size else 0.0)
    return advantages


def at_the_edge_of_noise(rewards: torch.Tensor, groups: torch.Tensor) -> bool:
    """Return whether a group's spread is so close to the threshold that rounding decides its side."""
    for group in groups.unique():
        r = rewards[(groups == group) & ~rewards.isnan()].double()
        if len(r) > 1 and 0 < r.abs().max() and 0.5e-6 < r.std() / r.abs().max() < 2e-6:
            return True
    return False


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@settings(deadline=None, max_examples=60)
@given(batch=batches())
def test_every_estimator_equals_its_slow_loop(name, batch):
    rewards, groups = batch
    assume(not at_the_edge_of_noise(rewards, groups))
    expected = torch.tensor(slow_estimator(name, rewards.tolist(), groups.tolist()), dtype=torch.float64)
    torch.testing.assert_close(ESTIMATORS[name](rewards.double(), groups), expected, atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("name", ["rloo", "grpo", "dr_grpo", "maxrl"])
@settings(deadline=None, max_examples=40)
@given(batch=batches(min_rows=1))
def test_estimators_that_compare_a_group_sum_to_zero_in_it(name, batch):
    rewards, groups = batch
    advantages = ESTIMATORS[name](rewards.double(), groups)
    sums = torch.zeros(6, dtype=torch.float64).index_add(0, groups, advantages)
    torch.testing.assert_close(sums, torch.zeros_like(sums), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@settings(deadline=None, max_examples=40)
@given(batch=batches(min_rows=1), random=st.randoms(use_true_random=False))
def test_every_estimator_follows_a_permutation_of_the_rows(name, batch, random):
    rewards, groups = batch
    assume(not at_the_edge_of_noise(rewards, groups))
    order = list(range(len(rewards)))
    random.shuffle(order)
    permuted = ESTIMATORS[name](rewards.double()[order], groups[order])
    torch.testing.assert_close(permuted, ESTIMATORS[name](rewards.double(), groups)[order], atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("name", ["rloo", "grpo", "dr_grpo"])
@settings(deadline=None, max_examples=40)
@given(st.data())
def test_a_shift_of_a_groups_rewards_changes_nothing_in_those_that_subtract_a_mean(name, data):
    groups = torch.tensor([0] * 4 + [1] * 3)
    rewards = torch.tensor(data.draw(st.lists(st.integers(-50, 50), min_size=7, max_size=7)), dtype=torch.float64)
    shifted = rewards + torch.tensor(data.draw(st.lists(st.floats(-50, 50), min_size=2, max_size=2)))[groups]
    expected = ESTIMATORS[name](rewards, groups)
    torch.testing.assert_close(ESTIMATORS[name](shifted, groups), expected, atol=1e-7, rtol=0)


def noisy_1000_1() -> torch.Tensor:
    """Return seven float32 rewards of 1000.1, three of which differ in the last bit."""
    rewards = torch.full((7,), 1000.1)
    rewards[::3] = torch.nextafter(rewards[::3], torch.tensor(2000.0))
    assert len(rewards.unique()) == 2
    return rewards


@pytest.mark.parametrize("name", ["rloo", "grpo", "dr_grpo", "maxrl"])
def test_equal_rewards_give_exactly_zero_in_every_group_method(name):
    for reward, dtype in (
        (1000.1, torch.float32),
        (0.1, torch.float64),
        (1 / 3, torch.float64),
        (1e-30, torch.float64),
    ):
        rewards = torch.full((7,), reward, dtype=dtype)
        assert ESTIMATORS[name](rewards, torch.zeros(7, dtype=torch.int64)).tolist() == [0.0] * 7


def test_grpo_divides_by_no_noise():
    groups = torch.zeros(7, dtype=torch.int64)
    assert group_normalized(noisy_1000_1(), groups).tolist() == [0.0] * 7
    with_a_second_group = torch.cat([noisy_1000_1(), torch.tensor([0.0, 1.0])])
    advantages = group_normalized(with_a_second_group, torch.tensor([0] * 7 + [1] * 2))
    assert advantages[:7].tolist() == [0.0] * 7
    torch.testing.assert_close(advantages[7:], torch.tensor([-0.7070068, 0.7070068]))


@pytest.mark.parametrize("n", [2, 64, 4096])
def test_one_success_among_many_is_signal(n):
    rewards = torch.zeros(n)
    rewards[0] = 1.0
    advantages = group_normalized(rewards, torch.zeros(n, dtype=torch.int64))
    std = math.sqrt(1 / n)
    assert advantages[0].item() == pytest.approx((1 - 1 / n) / (std + 1e-4), rel=1e-5) and (advantages[1:] < 0).all()


def test_maxrl_weighs_rare_success_more_and_never_turns_the_sign():
    groups = torch.zeros(4, dtype=torch.int64)
    assert mean_normalized(torch.tensor([1.0, 0, 0, 0]), groups).tolist() == [3.0, -1.0, -1.0, -1.0]
    assert mean_normalized(torch.tensor([1.0, 1, 1, 0]), groups)[0].item() == pytest.approx(1 / 3)
    assert mean_normalized(torch.zeros(4), groups).tolist() == [0.0] * 4
    negative = mean_normalized(torch.tensor([-1.0, -2, -3, -2]), groups)
    torch.testing.assert_close(negative, torch.tensor([0.5, 0.0, -0.5, 0.0]))
    near_zero_mean = mean_normalized(torch.tensor([1.0, -1.0, 1e-6, 0.0]), groups)
    assert near_zero_mean.abs().max() < 5


# several reward functions


def slow_gdpo(rewards: list[list[float]], groups: list[int], weights: list[float]) -> list[float]:
    sums = [0.0] * len(rewards)
    for k, weight in enumerate(weights):
        for i, advantage in enumerate(slow_estimator("grpo", [row[k] for row in rewards], groups)):
            sums[i] += weight * advantage
    return sums


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_normalize_then_sum_equals_a_slow_loop(data):
    n, k = data.draw(st.integers(0, 16)), data.draw(st.integers(1, 3))
    reward = st.one_of(st.integers(-5, 5).map(float), st.just(NAN))
    table = data.draw(st.lists(st.lists(reward, min_size=k, max_size=k), min_size=n, max_size=n))
    groups = data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    weights = data.draw(st.lists(st.floats(-2, 2, width=32), min_size=k, max_size=k))
    rewards, index = torch.tensor(table).reshape(n, k), torch.tensor(groups, dtype=torch.int64)
    actual = normalize_then_sum(rewards, index, weights)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, torch.tensor(slow_gdpo(table, groups, weights)), atol=1e-5, rtol=1e-5)


def test_a_function_that_abstains_leaves_a_row_to_the_others():
    rewards = torch.tensor([[1.0, 5.0], [0.0, NAN], [NAN, 3.0], [NAN, NAN]])
    advantages = normalize_then_sum(rewards, torch.zeros(4, dtype=torch.int64), [1.0, 10.0])
    half = 0.5 / (0.5**0.5 + 1e-4)
    second = 1 / (2**0.5 + 1e-4)
    torch.testing.assert_close(advantages, torch.tensor([half + 10 * second, -half, -10 * second, 0.0]))


def test_normalize_then_sum_does_not_let_one_function_drown_another():
    rewards = torch.tensor([[0.0, 1000.0], [1.0, 0.0]])
    advantages = normalize_then_sum(rewards, torch.zeros(2, dtype=torch.int64), [1.0, 1.0])
    torch.testing.assert_close(advantages, torch.zeros(2), atol=2e-4, rtol=0)
    with pytest.raises(ValueError, match="weights=.* 2 reward functions"):
        normalize_then_sum(rewards, torch.zeros(2, dtype=torch.int64), [1.0, 1.0, 1.0])


# whitening


def slow_whiten(values: list[float], center: bool, scale: bool) -> list[float]:
    mean = statistics.fmean(values) if center and values else 0.0
    if not scale:
        return [v - mean for v in values]
    std = statistics.stdev(values) if len(values) > 1 else 0.0
    if std <= 1e-6 * max(map(abs, values), default=0.0):
        return [0.0] * len(values)
    return [(v - mean) / (std + 1e-4) for v in values]


@settings(deadline=None, max_examples=80)
@given(st.data(), st.booleans(), st.booleans())
def test_whitening_equals_a_slow_loop(data, center, scale):
    shape = data.draw(st.sampled_from([(0,), (1,), (7,), (3, 5), (2, 0)]))
    n = math.prod(shape)
    flat = data.draw(st.lists(st.integers(-20, 20).map(float), min_size=n, max_size=n))
    chosen = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    values, mask = torch.tensor(flat).reshape(shape), torch.tensor(chosen, dtype=torch.bool).reshape(shape)
    expected = torch.zeros(shape)
    expected[mask] = torch.tensor(slow_whiten([v for v, c in zip(flat, chosen, strict=True) if c], center, scale))
    outside = torch.where(mask, values, NAN)  # values outside the mask are not read
    actual = whiten(outside, mask, center=center, scale=scale)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    everything = torch.tensor(slow_whiten(flat, center, scale)).reshape(shape)
    torch.testing.assert_close(whiten(values, center=center, scale=scale), everything, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("center", [True, False])
def test_whitening_divides_by_no_noise(center):
    assert whiten(torch.full((7,), 1000.1), center=center).tolist() == [0.0] * 7
    assert whiten(noisy_1000_1(), center=center).tolist() == [0.0] * 7
    noise = leave_one_out(noisy_1000_1(), torch.zeros(7, dtype=torch.int64))
    assert noise.abs().max() > 0
    assert whiten(noise, center=center, magnitude=1000.1).tolist() == [0.0] * 7


def test_whitened_advantages_have_mean_0_and_deviation_1_in_the_dtype_given():
    values = 50 * torch.randn(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 1e6
    whitened = whiten(values)
    assert whitened.mean().abs() < 1e-9 and (whitened.std() - 1).abs() < 1e-5
    assert whiten(values.bfloat16()).dtype == torch.bfloat16


TWO_RANKS = """
import sys
import torch
from torch import distributed
from torchrl_rloo.functional.advantages import whiten

rank, store = int(sys.argv[1]), sys.argv[2]
distributed.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
def reduce(value, op):
    value = value.clone()
    distributed.all_reduce(value, getattr(distributed.ReduceOp, op.upper()))
    return value

parts = ([1.0, 2.0, 4.0], [-3.0, 8.0])[rank]
tokens = torch.tensor(([[1.0, 2.0], [4.0, 99.0]], [[-3.0, 8.0]])[rank])
mask = torch.tensor(([[True, True], [True, False]], [[True, True]])[rank])
noisy = torch.tensor(([1000.1, 1000.1], [1000.1 + 6.2e-5])[rank])
results = [
    whiten(torch.tensor(parts), reduce=reduce),
    whiten(torch.tensor(parts), center=False, reduce=reduce),
    whiten(torch.tensor(parts), scale=False, reduce=reduce),
    whiten(tokens, mask, reduce=reduce),
    whiten(torch.tensor(([5.0, 7.0, 9.0], [])[rank]), reduce=reduce),
    whiten(noisy, reduce=reduce),
    whiten(torch.tensor(([1e-4, -1e-4], [0.0])[rank]), magnitude=(1000.0, 0.0)[rank], reduce=reduce),
]
print([r.flatten().tolist() for r in results])
distributed.destroy_process_group()
"""


def test_whitening_over_two_processes_is_that_of_the_whole_batch(tmp_path, fork_server):
    ranks = [fork_server.start(TWO_RANKS, [rank, tmp_path / "store"]) for rank in range(2)]
    try:
        assert [rank.wait(60) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    first, second = (ast.literal_eval(rank.stdout) for rank in ranks)
    whole = torch.tensor([1.0, 2.0, 4.0, -3.0, 8.0])
    assert first[0] + second[0] == pytest.approx(whiten(whole).tolist(), abs=1e-6)
    assert first[1] + second[1] == pytest.approx(whiten(whole, center=False).tolist(), abs=1e-6)
    assert first[2] + second[2] == pytest.approx(whiten(whole, scale=False).tolist(), abs=1e-6)
    assert first[3] + second[3] == pytest.approx([*whiten(whole).tolist()[:3], 0.0, *whiten(whole).tolist()[3:]])
    assert first[4] == pytest.approx(whiten(torch.tensor([5.0, 7.0, 9.0])).tolist()) and second[4] == []
    assert first[5] + second[5] == first[6] + second[6] == [0.0] * 3


# division by the reward std of the batch


@settings(deadline=None, max_examples=60)
@given(batch=batches(min_rows=2))
def test_reward_std_divides_group_centered_rewards_as_trls_scale_rewards_batch(batch):
    rewards, groups = batch
    given_rewards = [r for r in rewards.tolist() if not math.isnan(r)]
    std = statistics.stdev(given_rewards) if len(given_rewards) > 1 else 0.0
    assume(std == 0 or std > 1e-5 * max(map(abs, given_rewards)))
    advantages, mask = group_centered(rewards.double(), groups), ~rewards.isnan()
    actual = RewardStd(1)(advantages, mask, rewards, 0.0, lambda value, op: value)
    expected = advantages / (std + 1e-4) if std else torch.zeros_like(advantages)
    torch.testing.assert_close(actual, expected, atol=1e-9, rtol=1e-7)


def test_reward_std_divides_by_no_noise():
    rewards, mask = noisy_1000_1(), torch.ones(7, dtype=torch.bool)
    advantages = leave_one_out(rewards, torch.zeros(7, dtype=torch.int64))
    assert RewardStd(1)(advantages, mask, rewards, 0.0, lambda value, op: value).tolist() == [0.0] * 7


@pytest.mark.parametrize("normalization", [Whiten, RewardStd])
@pytest.mark.parametrize("groups", [0, -1, 2.0, True, None])
def test_normalizations_need_a_number_of_groups(normalization, groups):
    with pytest.raises(ValueError, match="groups=.* must be a whole number of at least 1"):
        normalization(groups)


def test_a_whitening_that_does_nothing_is_refused():
    with pytest.raises(ValueError, match="center=False and scale=False"):
        Whiten(1, center=False, scale=False)
