from __future__ import annotations

import math
import statistics
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import combinations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from torchrl_rloo.functional.advantages import (
    ESTIMATORS,
    PassAtK,
    RewardStd,
    SignalShare,
    Whiten,
    group_centered,
    group_normalized,
    leave_one_out,
    normalize_then_sum,
    whiten,
)

NAN = float("nan")


@st.composite
def batches(draw, min_rows: int = 0):
    """Sample rewards with abstentions, in groups of any size whose members are interleaved in any order."""
    n = draw(st.integers(min_rows, 24))
    reward = st.one_of(st.floats(-100, 100, width=32), st.sampled_from([0.0, 1.0, NAN]))
    rewards = draw(st.lists(reward, min_size=n, max_size=n))
    groups = draw(st.lists(st.integers(0, 5), min_size=n, max_size=n))
    return torch.tensor(rewards), torch.tensor(groups, dtype=torch.int64)


def third_of(name: str, n: int) -> list[torch.Tensor]:
    """Return the third argument of an estimator: lengths, or every third row as the greedy one."""
    numbers = torch.arange(n)
    return {"opo": [numbers % 5 + 1], "remax": [numbers % 3 == 0]}.get(name, [])


def estimate(name: str, rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    estimator = ESTIMATORS[name]() if isinstance(ESTIMATORS[name], type) else ESTIMATORS[name]
    return estimator(rewards, groups, *third_of(name, len(rewards)))


def test_a_large_reward_in_one_group_costs_another_no_precision():
    rewards, groups = torch.tensor([1e30, -1e30, 0.1, 0.2]), torch.tensor([0, 0, 1, 1])
    torch.testing.assert_close(leave_one_out(rewards, groups)[2:], torch.tensor([-0.1, 0.1]), atol=1e-7, rtol=0)


@settings(deadline=None, max_examples=40)
@given(batch=batches(min_rows=1), dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_every_estimator_keeps_dtype_and_input_and_gives_abstaining_rows_zero(name, batch, dtype):
    rewards, groups = batch[0].to(dtype), batch[1]
    before = rewards.clone()
    advantages = estimate(name, rewards, groups)
    assert advantages.shape == rewards.shape and advantages.dtype == dtype and advantages.isfinite().all()
    assert (advantages[rewards.isnan()] == 0).all() and torch.equal(rewards.nan_to_num(123.0), before.nan_to_num(123.0))


def slow_estimator(name: str, rewards: list[float], groups: list[int]) -> list[float]:
    """Compute each method's formula for one row at a time, from the list of rewards of its group."""
    advantages, third = [], [x for values in third_of(name, len(rewards)) for x in values.tolist()]
    for i, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        places = [j for j, (r, g) in enumerate(zip(rewards, groups, strict=True)) if g == group and not math.isnan(r)]
        of_group = [rewards[j] for j in places]
        if math.isnan(reward):
            advantages.append(0.0)
        elif name == "reinforce":
            advantages.append(reward)
        elif name == "remax":
            greedy = [rewards[j] for j in places if third[j]]
            advantages.append(sum(reward - r for r in greedy) if len(greedy) == 1 and not third[i] else 0.0)
        elif len(of_group) < 2:
            advantages.append(0.0)
        elif name == "opo":
            weighted = math.fsum(third[j] * rewards[j] for j in places)
            advantages.append(reward - weighted / sum(third[j] for j in places))
        elif name == "leave_one_out_max":
            advantages.append(max(of_group) - max(rewards[j] for j in places if j != i))
        elif name == "pass_at_k":
            advantages.append(slow_pass_at_k(places, i, [r >= 1 for r in rewards]))
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


def slow_pass_at_k(places: list[int], i: int, right: list[bool], k: int = 4) -> float:
    """Normalize the mean reward of all choices of k members that contain one, by those of all choices."""
    if len(places) < k:
        return 0.0
    passed = {chosen: float(any(right[j] for j in chosen)) for chosen in combinations(places, k)}
    mean, std = statistics.fmean(passed.values()), statistics.pstdev(passed.values())
    return (statistics.fmean(v for c, v in passed.items() if i in c) - mean) / std if std else 0.0


def test_pass_at_k_is_the_closed_form_of_the_paper():
    n, k, rewards = 8, 3, torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    rate = 1 - math.comb(6, k) / math.comb(n, k)
    sigma = math.sqrt(rate * (1 - rate))
    wrong = (1 - rate - math.comb(5, k - 1) / math.comb(n - 1, k - 1)) / sigma
    expected = torch.where(rewards == 1, (1 - rate) / sigma, wrong)
    torch.testing.assert_close(PassAtK(k)(rewards, torch.zeros(n, dtype=torch.int64)), expected)


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
    if name == "remax":
        assume(all(sum(groups[third_of(name, len(groups))[0]] == g) < 2 for g in groups.unique()))
    torch.testing.assert_close(estimate(name, rewards.double(), groups), expected, atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("name", ["rloo", "grpo", "dr_grpo", "maxrl"])
@settings(deadline=None, max_examples=40)
@given(batch=batches(min_rows=1))
def test_estimators_that_compare_a_group_sum_to_zero_in_it(name, batch):
    rewards, groups = batch
    advantages = ESTIMATORS[name](rewards.double(), groups)
    sums = torch.zeros(6, dtype=torch.float64).index_add(0, groups, advantages)
    torch.testing.assert_close(sums, torch.zeros_like(sums), atol=1e-6, rtol=0)


def noisy_1000_1() -> torch.Tensor:
    """Return seven float32 rewards of 1000.1, three of which differ in the last bit."""
    rewards = torch.full((7,), 1000.1)
    rewards[::3] = torch.nextafter(rewards[::3], torch.tensor(2000.0))
    assert len(rewards.unique()) == 2
    return rewards


@pytest.mark.parametrize("name", ["rloo", "grpo", "dr_grpo", "maxrl"])
@settings(deadline=None, max_examples=40)
@given(reward=st.floats(-(2.0**100), 2.0**100, width=32), n=st.integers(1, 40), double=st.booleans())
def test_equal_rewards_give_exactly_zero_in_every_group_method(name, reward, n, double):
    rewards = torch.full((n,), reward, dtype=torch.float64 if double else torch.float32)
    assert (ESTIMATORS[name](rewards * (1 + double / 3), torch.zeros(n, dtype=torch.int64)) == 0).all()


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
    with pytest.raises(ValueError, match=f"weights=.* {k} reward functions"):
        normalize_then_sum(rewards, index, [*weights, 1.0])


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
    assert whiten(values.bfloat16()).dtype == torch.bfloat16


class Threads:
    """Reduction over ranks that are threads."""

    def __init__(self, ranks: int):
        self.barrier, self.values = threading.Barrier(ranks, timeout=60), [None] * ranks

    def reduce(self, rank: int, value: torch.Tensor, op: str) -> torch.Tensor:
        self.values[rank] = value
        self.barrier.wait()
        stacked = torch.stack(self.values)
        self.barrier.wait()  # no rank writes the next value while another reads
        return stacked.sum(0) if op == "sum" else stacked.amax(0)


@settings(deadline=None, max_examples=40)
@given(
    rows=st.lists(st.tuples(st.integers(-20, 20).map(float), st.booleans(), st.integers(0, 2)), min_size=1, max_size=9),
    center=st.booleans(),
    scale=st.booleans(),
    magnitudes=st.tuples(*[st.sampled_from([0.0, 1e9])] * 3),
)
def test_whitening_over_ranks_is_that_of_the_whole_batch(rows, center, scale, magnitudes):
    rows.sort(key=lambda row: row[2])
    values, mask = torch.tensor([v for v, _, _ in rows]), torch.tensor([m for _, m, _ in rows])
    threads, sizes = Threads(3), [sum(rank == r for _, _, r in rows) for rank in range(3)]

    def of_rank(rank: int, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        reduce = partial(threads.reduce, rank)
        return whiten(values, mask, center=center, scale=scale, magnitude=magnitudes[rank], reduce=reduce)

    with ThreadPoolExecutor(3) as pool:
        parts = list(pool.map(of_rank, range(3), values.split(sizes), mask.split(sizes)))
    expected = whiten(values, mask, center=center, scale=scale, magnitude=max(magnitudes))
    torch.testing.assert_close(torch.cat(parts), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("center", [True, False])
def test_normalizations_divide_by_no_noise(center):
    assert whiten(torch.full((7,), 1000.1), center=center).tolist() == [0.0] * 7
    assert whiten(noisy_1000_1(), center=center).tolist() == [0.0] * 7
    noise = leave_one_out(noisy_1000_1(), torch.zeros(7, dtype=torch.int64))
    assert noise.abs().max() > 0
    assert whiten(noise, center=center, magnitude=1000.1).tolist() == [0.0] * 7
    everything = torch.ones(7, dtype=torch.bool)
    assert RewardStd(1)(noise, everything, noisy_1000_1(), 0.0, lambda value, op: value, None).tolist() == [0.0] * 7


# division by the reward std of the batch


@settings(deadline=None, max_examples=60)
@given(batch=batches(min_rows=2))
def test_reward_std_divides_group_centered_rewards_as_trls_scale_rewards_batch(batch):
    rewards, groups = batch
    given_rewards = [r for r in rewards.tolist() if not math.isnan(r)]
    std = statistics.stdev(given_rewards) if len(given_rewards) > 1 else 0.0
    assume(std == 0 or std > 1e-5 * max(map(abs, given_rewards)))
    advantages, mask = group_centered(rewards.double(), groups), ~rewards.isnan()
    actual = RewardStd(1)(advantages, mask, rewards, 0.0, lambda value, op: value, None)
    expected = advantages / (std + 1e-4) if std else torch.zeros_like(advantages)
    torch.testing.assert_close(actual, expected, atol=1e-9, rtol=1e-7)


def test_signal_share_divides_by_the_share_of_rows_in_groups_with_a_signal():
    """GPG's alpha is B / (B - M): here 3 of 8 rows have equal rewards, on two ranks."""
    groups = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1])
    rewards = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.5, 1.0, 0.5, 0.5])
    advantages = group_centered(rewards, groups)[:, None]  # a row of group 1 may have 0
    share = SignalShare(2)
    ours = share(advantages, None, rewards, 0.0, lambda value, op: value, groups)
    torch.testing.assert_close(ours, advantages * 8 / 5)
    halves = share(
        advantages[:3], None, rewards[:3], 0.0, lambda value, op: value + torch.tensor([5.0, 5.0]), groups[:3]
    )
    assert not halves.any()
    other = share(
        advantages[3:], None, rewards[3:], 0.0, lambda value, op: value + torch.tensor([3.0, 0.0]), groups[3:]
    )
    torch.testing.assert_close(other, advantages[3:] * 8 / 5)


@pytest.mark.parametrize("normalization", [Whiten, RewardStd, SignalShare])
def test_normalizations_without_a_number_of_groups_or_an_effect_are_refused(normalization):
    for groups in (0, -1, 2.0, True, None):
        with pytest.raises(ValueError, match="groups=.* must be a whole number of at least 1"):
            normalization(groups)
    with pytest.raises(ValueError, match="center=False and scale=False"):
        Whiten(1, center=False, scale=False)
