from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_rloo.functional.preference import (
    DPO,
    IPO,
    KTO,
    ORPO,
    PREFERENCE_OBJECTIVES,
    SimPO,
    batch_sum_to_zero,
    bradley_terry,
    centering,
    kto_reference_point,
)

pairs = st.lists(st.tuples(st.floats(-9, 9), st.floats(-9, 9)), min_size=1, max_size=6)
log_prob_pairs = st.lists(st.tuples(st.floats(-6, -0.01), st.floats(-6, -0.01)), min_size=1, max_size=6)
betas = st.floats(0.02, 3.0)
fractions = st.floats(0.0, 0.49)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def odds(log_prob: float) -> float:
    return math.exp(log_prob) / (1 - math.exp(log_prob))


def columns(values: list[tuple[float, float]]) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.tensor(values, dtype=torch.float64).T)


def equal(actual: torch.Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-9)


@settings(deadline=None, max_examples=60)
@given(pairs, betas, fractions)
def test_dpo_and_ipo_equal_a_slow_loop(values, beta, smoothing):
    chosen, rejected = columns(values)
    expected = []
    for w, r in values:
        right, wrong = sigmoid(beta * (w - r)), sigmoid(beta * (r - w))
        expected.append(-(1 - smoothing) * math.log(right) - smoothing * math.log(wrong))
    equal(DPO(beta=beta, label_smoothing=smoothing)(chosen, rejected), expected)
    equal(IPO(beta=beta)(chosen, rejected), [(w - r - 1 / (2 * beta)) ** 2 for w, r in values])


@settings(deadline=None, max_examples=60)
@given(log_prob_pairs, betas, st.floats(0.0, 2.0), st.floats(0.0, 2.0))
def test_orpo_and_simpo_equal_a_slow_loop(values, beta, alpha, gamma):
    chosen, rejected = columns(values)
    expected = [-w - alpha * math.log(sigmoid(math.log(odds(w) / odds(r)))) for w, r in values]
    equal(ORPO(alpha=alpha)(chosen, rejected), expected)
    expected = [-math.log(sigmoid(beta * (w - r) - gamma)) - alpha * w for w, r in values]
    equal(SimPO(beta=beta, gamma=gamma, cpo_alpha=alpha)(chosen, rejected), expected)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.floats(-9, 9), st.booleans()), min_size=1, max_size=6),
    st.lists(st.floats(-3, 3), min_size=2, max_size=6),
    betas,
    st.tuples(st.floats(0.1, 2.0), st.floats(0.1, 2.0)),
)
def test_kto_equals_a_slow_loop(rows, mismatched, beta, weights):
    ratios = torch.tensor([h for h, _ in rows], dtype=torch.float64)
    desirable = torch.tensor([d for _, d in rows])
    point = kto_reference_point(torch.tensor(mismatched, dtype=torch.float64))
    z = max(0.0, sum(mismatched) / len(mismatched))
    assert point.item() == pytest.approx(z, abs=1e-12)
    expected = [
        weights[0] * (1 - sigmoid(beta * (h - z))) if d else weights[1] * (1 - sigmoid(beta * (z - h))) for h, d in rows
    ]
    actual = KTO(beta=beta, desirable_weight=weights[0], undesirable_weight=weights[1])(ratios, desirable, point)
    equal(actual, expected)


def test_gradcheck():
    generator = torch.Generator().manual_seed(0)
    chosen, rejected = (-3 * torch.rand(5, dtype=torch.float64, generator=generator) - 0.05 for _ in range(2))
    chosen.requires_grad_(), rejected.requires_grad_()
    for function in (
        lambda w, r: DPO(beta=0.7, label_smoothing=0.1)(w, r),
        lambda w, r: IPO(beta=0.7)(w, r),
        lambda w, r: ORPO(alpha=0.7)(w, r),
        lambda w, r: SimPO(cpo_alpha=0.3)(w, r),
    ):
        torch.autograd.gradcheck(function, (chosen, rejected))
    desirable, point = torch.tensor([True, False, True, False, False]), torch.tensor(0.4, dtype=torch.float64)
    torch.autograd.gradcheck(lambda h: KTO(beta=0.7, undesirable_weight=1.3)(h, desirable, point), chosen)
    margin = torch.rand(5, dtype=torch.float64, generator=generator)
    assert torch.autograd.gradcheck(lambda c, r: bradley_terry(c, r, margin, label_smoothing=0.1), (chosen, rejected))
    assert torch.autograd.gradcheck(centering, (chosen, rejected))


def test_reference_point_is_never_negative_and_carries_no_gradient():
    mismatched = torch.tensor([-1.0, 0.5], requires_grad=True)
    point = kto_reference_point(mismatched)
    assert point.item() == 0 and not point.requires_grad
    assert not kto_reference_point(mismatched + 2).requires_grad


@pytest.mark.parametrize("extreme", [-1e4, -100.0, -1e-9, 0.0])
def test_extreme_log_probs_give_finite_values_and_gradients(extreme):
    for objective in (kind() for kind in PREFERENCE_OBJECTIVES.values()):
        for swap in (False, True):
            x, y = torch.tensor([extreme], requires_grad=True), torch.tensor([-0.7], requires_grad=True)
            if objective.paired:
                loss = objective(y, x) if swap else objective(x, y)
            else:
                loss = objective(x, torch.tensor([swap]), torch.tensor(0.2)) + 0 * y
            loss.sum().backward()
            assert loss.isfinite().all() and x.grad.isfinite().all() and y.grad.isfinite().all()


def test_losses_equal_trl():
    """Recorded from TRL 1.16.0 on sequences of a small random model (float32): inputs and losses of its trainers."""

    def check(objective, chosen: list[float], rejected: list[float], expected: float) -> None:
        loss = objective(torch.tensor(chosen).double(), torch.tensor(rejected).double())
        assert loss.mean().item() == pytest.approx(expected, rel=3e-6)

    chosen = [-0.8536505699157715, 0.24845170974731445, -5.43658447265625]
    rejected = [1.3863797187805176, -0.23483800888061523, 0.011214256286621094]
    check(DPO(beta=0.3), chosen, rejected, 1.1734665632247925)
    chosen = [-0.12195008248090744, 0.04969034343957901, -0.3397865295410156]
    rejected = [0.198054239153862, -0.07827933877706528, 0.0037380855064839125]
    check(IPO(beta=0.3), chosen, rejected, 3.4517719745635986)
    chosen, rejected = [-6.35765266418457, -6.272550582885742], [-6.565004348754883, -6.114382266998291]
    check(SimPO(beta=0.4, gamma=0.5, cpo_alpha=0.7), chosen, rejected, 5.389165878295898)
    # TRL's other term also covers the prompt
    check(lambda c, r: ORPO(alpha=0.25)(c, r) + c, chosen, rejected, 0.17127752304077148)
    point = kto_reference_point(torch.tensor([11.097589492797852, 17.472257614135742, 9.0625]))
    assert point.item() == pytest.approx(12.544116020202637, rel=3e-6)
    ratios = torch.tensor([19.871742248535156, 10.761236190795898, 14.02194595336914])
    loss = KTO(beta=0.3, desirable_weight=1.2, undesirable_weight=0.8)(ratios, torch.tensor([True, False, True]), point)
    assert loss.mean().item() == pytest.approx(0.29484114050865173, rel=3e-6)


triples = st.lists(st.tuples(st.floats(-9, 9), st.floats(-9, 9), st.floats(0, 3)), min_size=1, max_size=6)


@settings(deadline=None, max_examples=60)
@given(triples, st.floats(0.0, 0.49))
def test_bradley_terry_and_centering_equal_a_slow_loop(values, smoothing):
    chosen, rejected, margin = torch.tensor(values, dtype=torch.float64).T
    expected = []
    for w, r, m in values:
        right, flipped = sigmoid(w - r - m), sigmoid(r - w - m)  # a wrong label swaps the pair
        expected.append(-(1 - smoothing) * math.log(right) - smoothing * math.log(flipped))
    equal(bradley_terry(chosen, rejected, margin, label_smoothing=smoothing), expected)
    equal(centering(chosen, rejected), [(w + r) ** 2 for w, r, _ in values])


@pytest.mark.parametrize("mean", [-3.0, 0.0, 0.7, 8.0])
@pytest.mark.parametrize("variance", [0.01, 1.0, 9.0, 50.0])
def test_gaussian_rewards_have_the_likelihood_of_an_integral(mean, variance):
    """Compare with a sum over a fine grid."""
    step, std = 1e-3, math.sqrt(variance)
    grid = [-9 + step * k for k in range(18_001)]
    likelihood = sum(sigmoid(mean + std * z) * math.exp(-(z**2) / 2) / math.sqrt(2 * math.pi) * step for z in grid)
    args = (torch.tensor([mean + 1.0], dtype=torch.float64), torch.tensor([1.0], dtype=torch.float64))
    loss = bradley_terry(*args, variance=torch.tensor([variance], dtype=torch.float64))
    assert loss.item() == pytest.approx(-math.log(likelihood), rel=3e-3)


def test_far_apart_rewards_stay_finite():
    far = torch.tensor([1e4, -1e4], requires_grad=True)
    loss = bradley_terry(far, -far)
    loss.sum().backward()
    assert loss.tolist() == [0.0, 2e4] and far.grad.isfinite().all()


@pytest.mark.parametrize("cuts", [[6], [2, 4], [1, 1, 1, 1, 1, 1]])
def test_parts_of_the_batch_sum_add_up(cuts):
    """Values add up to the squared mean, gradients to the gradient of the squared mean."""
    rewards = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    whole = (sum(rewards[i] for i in range(6)) / 6) ** 2
    (expected,) = torch.autograd.grad(whole, rewards)
    parts = [batch_sum_to_zero(part.sum() / 6, rewards.mean()) for part in rewards.split(cuts)]
    equal(sum(parts), float(whole))
    torch.testing.assert_close(torch.autograd.grad(sum(parts), rewards)[0], expected)
