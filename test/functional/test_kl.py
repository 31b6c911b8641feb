from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_rloo.functional.kl import (
    KL_ESTIMATORS,
    adapt_coefficient,
    k1,
    k2,
    k3,
    kl_loss_terms,
    kl_penalized_reward,
)
from torchrl_rloo.functional.ratios import MAX_LOG_RATIO


def log_prob_pairs(limit: float = 30.0):
    pair = st.tuples(st.floats(-limit, 0, width=32), st.floats(-limit, 0, width=32))
    return st.lists(pair, min_size=1, max_size=8)


@settings(deadline=None, max_examples=60)
@given(log_prob_pairs(limit=MAX_LOG_RATIO))
def test_the_estimators_equal_a_slow_loop(pairs):
    policy, reference = torch.tensor(pairs, dtype=torch.float64).T
    log_ratios = [p - q for p, q in pairs]
    assert k1(policy, reference).tolist() == log_ratios
    expected = torch.tensor([math.exp(-x) - 1 + x for x in log_ratios], dtype=torch.float64)
    torch.testing.assert_close(k3(policy, reference), expected, atol=1e-12, rtol=1e-9)
    assert k2(policy, reference).tolist() == pytest.approx([x * x / 2 for x in log_ratios])


@settings(deadline=None, max_examples=60)
@given(st.floats(-1, 1, width=32), st.integers(0, 12))
def test_k3_is_never_negative_in_float32(value, power):
    difference = torch.tensor([value * 10.0**-power])
    assert k3(difference, torch.zeros(1)) >= 0
    assert k3(torch.zeros(1), difference) >= 0


def test_k3_stays_finite_and_keeps_its_direction_when_the_policy_has_left_a_token():
    policy = torch.tensor([-200.0, -45.0, -19.9], requires_grad=True)
    value = k3(policy, torch.zeros(3))
    value.sum().backward()
    assert value.isfinite().all() and policy.grad.isfinite().all()
    assert (policy.grad < -1e8).all() and value[0] > value[1] > value[2]


def test_k1_and_k3_estimate_the_divergence_without_bias():
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
    result = kl_penalized_reward(torch.tensor(rewards, dtype=torch.float64), kl, coeff)
    torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float64))
    kl.requires_grad_()
    assert not kl_penalized_reward(torch.tensor(rewards), kl, coeff).requires_grad
    assert kl_penalized_reward(torch.full((len(rewards),), math.nan), kl, coeff).isnan().all()


class Categorical:
    """Distributions over four tokens in float64, so that expectations are exact sums."""

    def __init__(self, seed: int, on_policy: bool):
        generator = torch.Generator().manual_seed(seed)
        self.theta, old, ref = (torch.randn(4, generator=generator, dtype=torch.float64) for _ in range(3))
        self.theta.requires_grad_()
        self.policy, self.ref = self.theta.log_softmax(0), ref.log_softmax(0)
        self.old = self.policy.detach() if on_policy else old.log_softmax(0)

    def gradient(self, value: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(value, self.theta, retain_graph=True)[0]

    def reverse_kl(self) -> torch.Tensor:
        return sum(p.exp() * (p - q) for p, q in zip(self.policy, self.ref, strict=True))

    def expected(self, estimator: str, weighted: bool) -> torch.Tensor:
        """Compute the mean of the loss terms over samples of the old policy."""
        log_ratio = (self.policy - self.old)[None] if weighted else None
        terms = kl_loss_terms(self.policy[None], self.ref[None], estimator, log_ratio)
        return (self.old.exp() * terms[0]).sum()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_weighted_terms_have_the_gradient_of_the_reverse_kl(estimator: str, on_policy: bool, seed: int):
    case = Categorical(seed, on_policy)
    truth = case.gradient(case.reverse_kl())
    torch.testing.assert_close(case.gradient(case.expected(estimator, weighted=True)), truth)
    if estimator != "k2":
        torch.testing.assert_close(case.expected(estimator, weighted=True), case.reverse_kl())
    if not on_policy:  # without the weights no estimator has it
        assert (case.gradient(case.expected(estimator, weighted=False)) - truth).norm() > 0.05 * truth.norm()


@pytest.mark.parametrize("seed", range(5))
def test_on_policy_only_k2_has_it_unweighted(seed: int):
    case = Categorical(seed, on_policy=True)
    k1s, k2s, k3s = (case.gradient(case.expected(name, weighted=False)) for name in KL_ESTIMATORS)
    torch.testing.assert_close(k1s, torch.zeros_like(k1s))
    torch.testing.assert_close(k2s, case.gradient(case.reverse_kl()))
    forward_kl = (case.ref.exp() * (case.ref - case.policy)).sum()
    torch.testing.assert_close(k3s, case.gradient(forward_kl))


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_gradients_are_those_of_finite_differences(estimator: str):
    generator = torch.Generator().manual_seed(0)
    log_probs, ref, old = (-torch.rand(2, 3, generator=generator, dtype=torch.float64) * 3 for _ in range(3))
    log_probs.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: kl_loss_terms(x, ref, estimator), log_probs)
    if estimator != "k2":  # the ratio of k2 is a constant
        assert torch.autograd.gradcheck(lambda x: kl_loss_terms(x, ref, estimator, x - old), log_probs)


def test_terms_are_zero_on_padding_and_take_functions():
    padding = torch.zeros(1, 2)
    for name in KL_ESTIMATORS:
        assert (kl_loss_terms(padding, padding, name, padding) == 0).all()
    log_probs = torch.tensor([[-1.0]])
    assert kl_loss_terms(log_probs, torch.tensor([[-3.0]]), lambda p, q: 10 * (p - q)).item() == 20.0


@settings(deadline=None, max_examples=60)
@given(st.floats(1e-3, 10), st.floats(-5, 50), st.floats(0.01, 10), st.floats(0, 4.9))
def test_the_controller_moves_towards_the_target(coeff, kl, target, gain):
    adapted = adapt_coefficient(coeff, kl, (target, target), gain)
    error = kl / target - 1
    expected = coeff + coeff * gain * (0.2 if error > 0.2 else -0.2 if error < -0.2 else error)
    assert adapted == pytest.approx(expected) and adapted > 0
    if kl > 1e-6:
        assert adapt_coefficient(coeff, kl, (kl, kl + 1), gain) == coeff
        ends = [adapt_coefficient(coeff, kl, window, gain) for window in ((target, 100), (1e-9, target))]
        assert ends == ([coeff, adapted] if kl > target else [adapted, coeff])
