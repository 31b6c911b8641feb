from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_rloo.functional.value_loss import clipped_value_loss, explained_variance

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


def test_gradients_are_those_of_finite_differences():
    values = torch.tensor([[0.1, 0.9, -0.7, 0.3]], dtype=torch.float64, requires_grad=True)
    old = torch.zeros(1, 4, dtype=torch.float64)
    targets = torch.tensor([[1.0, 1.1, 1.0, -2.0]], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda v: clipped_value_loss(v, old, targets, 0.2), values)


def test_the_clip_removes_the_gradient_only_of_a_value_that_has_gone_far_enough():
    values = torch.tensor([0.5, 0.5, 0.1], requires_grad=True)  # towards its target, away from it, within the clip
    clipped_value_loss(values, torch.zeros(3), torch.tensor([1.0, -1.0, 1.0]), 0.2).sum().backward()
    assert values.grad.tolist() == pytest.approx([0.0, 1.5, -0.9])


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
