from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_rloo.functional.reward_model import batch_sum_to_zero, bradley_terry, centering

triples = st.lists(st.tuples(st.floats(-9, 9), st.floats(-9, 9), st.floats(0, 3)), min_size=1, max_size=6)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def equal(actual: torch.Tensor, expected) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-9)


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


def test_a_margin_asks_for_more_and_a_constant_changes_nothing_but_centering():
    chosen, rejected = torch.tensor([1.0, 2.0], dtype=torch.float64), torch.tensor([0.5, 3.0], dtype=torch.float64)
    plain = bradley_terry(chosen, rejected)
    assert (bradley_terry(chosen, rejected, 1.0) > plain).all()
    equal(bradley_terry(chosen + 7, rejected + 7), plain.tolist())
    assert (centering(chosen + 7, rejected + 7) > centering(chosen, rejected)).all()
    equal(bradley_terry(chosen, chosen), [math.log(2)] * 2)


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


def test_gradients_are_right():
    g = torch.Generator().manual_seed(1)
    chosen, rejected = (torch.randn(5, dtype=torch.float64, generator=g, requires_grad=True) for _ in range(2))
    margin = torch.rand(5, dtype=torch.float64, generator=g)
    assert torch.autograd.gradcheck(lambda c, r: bradley_terry(c, r, margin, label_smoothing=0.1), (chosen, rejected))
    assert torch.autograd.gradcheck(centering, (chosen, rejected))
