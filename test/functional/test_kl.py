from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_rloo.functional import k1, k3, kl_penalised_reward


def log_prob_pairs(limit: float = 30.0):
    pair = st.tuples(st.floats(-limit, 0, width=32), st.floats(-limit, 0, width=32))
    return st.lists(pair, min_size=1, max_size=8)


@settings(deadline=None, max_examples=60)
@given(log_prob_pairs())
def test_k1_and_k3_equal_a_slow_loop(pairs):
    policy, reference = torch.tensor(pairs, dtype=torch.float64).T
    log_ratios = [p - q for p, q in pairs]
    assert k1(policy, reference).tolist() == log_ratios
    expected = torch.tensor([math.exp(-x) - 1 + x for x in log_ratios], dtype=torch.float64)
    torch.testing.assert_close(k3(policy, reference), expected, atol=1e-12, rtol=1e-9)


@settings(deadline=None, max_examples=60)
@given(st.floats(-1, 1, width=32), st.integers(0, 12))
def test_k3_is_never_negative_in_float32(value, power):
    difference = torch.tensor([value * 10.0**-power])
    assert k3(difference, torch.zeros(1)) >= 0
    assert k3(torch.zeros(1), difference) >= 0


def test_both_estimate_the_divergence_without_bias():
    policy = torch.tensor([2.0, 0.5, -1.0, 0.0], dtype=torch.float64).log_softmax(0)
    reference = torch.tensor([0.0, 1.0, 0.3, -2.0], dtype=torch.float64).log_softmax(0)
    divergence = sum(p.exp() * (p - q) for p, q in zip(policy, reference, strict=True))
    for estimator in (k1, k3):
        torch.testing.assert_close((policy.exp() * estimator(policy, reference)).sum(), divergence)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(-5, 5), min_size=1, max_size=5), st.floats(0, 2), st.integers(0, 4))
def test_penalty_equals_a_slow_loop(rewards, coeff, length):
    kl = torch.linspace(-1, 2, len(rewards) * length, dtype=torch.float64).reshape(len(rewards), length)
    expected = [r - coeff * math.fsum(row) for r, row in zip(rewards, kl.tolist(), strict=True)]
    result = kl_penalised_reward(torch.tensor(rewards, dtype=torch.float64), kl, coeff)
    torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float64))


def test_penalty_is_a_sum_over_tokens_and_passes_no_gradient():
    kl = torch.full((2, 3), 0.5, requires_grad=True)
    rewards = torch.tensor([1.0, 0.0], requires_grad=True)
    penalised = kl_penalised_reward(rewards, kl, 0.1)
    torch.testing.assert_close(penalised.detach(), torch.tensor([0.85, -0.15]))
    penalised.sum().backward()
    assert kl.grad is None and rewards.grad.tolist() == [1.0, 1.0]


def test_a_longer_row_of_higher_kl_earns_less():
    short, long = torch.tensor([[0.2, 0.0, 0.0]]), torch.tensor([[0.2, 0.2, 0.2]])
    reward = torch.ones(1)
    assert kl_penalised_reward(reward, long, 0.5) < kl_penalised_reward(reward, short, 0.5)


def test_an_abstaining_row_still_abstains():
    assert kl_penalised_reward(torch.tensor([float("nan")]), torch.ones(1, 2), 0.1).isnan().all()
