from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_rloo.functional import clip_masks, clipped_objective, reinforce_objective, sequence_log_ratio

rows_of_floats = st.lists(st.tuples(st.floats(-3, 3), st.floats(-4, 4)), min_size=1, max_size=8)
epsilons = st.tuples(st.floats(0.01, 1.0), st.floats(0.01, 2.0))


def slow_objective(log_ratio: float, advantage: float, low: float, high: float) -> float:
    ratio = math.exp(log_ratio)
    return -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)


def slow_gradient(log_ratio: float, advantage: float, low: float, high: float) -> float:
    """d objective / d log_ratio, away from the clip's corners."""
    ratio = math.exp(log_ratio)
    removed = (advantage > 0 and ratio > 1 + high) or (advantage < 0 and ratio < 1 - low)
    return 0.0 if removed else -ratio * advantage


@settings(deadline=None, max_examples=60)
@given(rows_of_floats, epsilons)
def test_clipped_objective_and_its_gradient_equal_a_slow_loop(rows, epsilon):
    low, high = epsilon
    log_ratio, advantages = torch.tensor(rows, dtype=torch.float64).T
    log_ratio = log_ratio.clone().requires_grad_()
    objective = clipped_objective(log_ratio, advantages, low, high)
    expected = torch.tensor([slow_objective(x, a, low, high) for x, a in rows], dtype=torch.float64)
    torch.testing.assert_close(objective.detach(), expected)
    objective.sum().backward()
    gradient = torch.tensor([slow_gradient(x, a, low, high) for x, a in rows], dtype=torch.float64)
    corner = ((log_ratio.exp() - 1 + low).abs() < 1e-9) | ((log_ratio.exp() - 1 - high).abs() < 1e-9)
    torch.testing.assert_close(log_ratio.grad[~corner], gradient[~corner])


@settings(deadline=None, max_examples=60)
@given(rows_of_floats, epsilons)
def test_clip_masks_mark_the_rows_without_gradient(rows, epsilon):
    low, high = epsilon
    log_ratio, advantages = torch.tensor(rows, dtype=torch.float64).T
    low_mask, high_mask = clip_masks(log_ratio, advantages, low, high)
    assert low_mask.tolist() == [math.exp(x) < 1 - low and a < 0 for x, a in rows]
    assert high_mask.tolist() == [math.exp(x) > 1 + high and a > 0 for x, a in rows]


def test_gradcheck():
    log_ratio = torch.tensor([-0.9, -0.1, 0.05, 0.15, 1.0], dtype=torch.float64, requires_grad=True)
    for sign in (1.0, -1.0):
        advantages = sign * torch.tensor([1.0, -2.0, 0.5, 3.0, 1.0], dtype=torch.float64)
        torch.autograd.gradcheck(lambda x, a=advantages: clipped_objective(x, a, 0.2, 0.3), log_ratio)
    log_probs = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()
    old, advantages = torch.zeros(3, 4, dtype=torch.float64), torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    torch.autograd.gradcheck(lambda x: sequence_log_ratio(x, old, mask), log_probs)
    torch.autograd.gradcheck(lambda x: reinforce_objective(x, advantages, mask), log_probs)


def test_on_policy_gradient_is_that_of_reinforce():
    advantages, mask = torch.tensor([1.5, -0.5]), torch.tensor([[True, True], [True, False]])
    log_probs = torch.tensor([[-1.0, -2.0], [-0.5, 0.0]], requires_grad=True)
    log_ratio = sequence_log_ratio(log_probs, log_probs.detach(), mask)
    (clipped,) = torch.autograd.grad(clipped_objective(log_ratio, advantages, 0.2, 0.2).sum(), log_probs)
    (plain,) = torch.autograd.grad(reinforce_objective(log_probs, advantages, mask).sum(), log_probs)
    assert torch.equal(clipped, plain)
    assert clipped.tolist() == [[-1.5, -1.5], [0.5, 0.0]]


def test_objective_falls_back_to_the_unclipped_one():
    log_ratio, advantages = torch.tensor([-5.0, 3.0, 0.3]), torch.tensor([-1.0, 1.0, 2.0])
    unclipped = -(log_ratio.exp() * advantages)
    torch.testing.assert_close(clipped_objective(log_ratio, advantages, 1.0, math.inf), unclipped)


@pytest.mark.parametrize("epsilon", [(0.2, 0.2), (1.0, math.inf)])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("log_ratio", [-200.0, -30.0, 30.0, 88.8, 200.0])
def test_extreme_log_ratios_give_finite_values_and_gradients(log_ratio, advantage, epsilon):
    x = torch.tensor([log_ratio], requires_grad=True)
    objective = clipped_objective(x, torch.tensor([advantage]), *epsilon)
    objective.sum().backward()
    assert objective.isfinite().all() and x.grad.isfinite().all()
    if advantage == 0:
        assert objective.item() == 0 and x.grad.item() == 0


def test_extreme_ratios_that_the_clip_bounds_have_its_value():
    log_ratio = torch.tensor([30.0, 200.0, -30.0, -200.0], requires_grad=True)
    objective = clipped_objective(log_ratio, torch.tensor([1.0, 2.0, -1.0, -2.0]), 0.2, 0.3)
    torch.testing.assert_close(objective.detach(), torch.tensor([-1.3, -2.6, 0.8, 1.6]))
    objective.sum().backward()
    assert log_ratio.grad.tolist() == [0.0] * 4


@pytest.mark.parametrize("log_ratio", [15.0, 21.0, 30.0, 80.0])
def test_a_bad_row_of_high_ratio_is_pushed_down(log_ratio):
    """The clip leaves a high ratio with a negative advantage alone: the row keeps its gradient and is not counted."""
    x, advantages = torch.tensor([log_ratio], requires_grad=True), torch.tensor([-1.0])
    clipped_objective(x, advantages, 0.2, 0.2).sum().backward()
    assert not any(mask.any() for mask in clip_masks(x.detach(), advantages, 0.2, 0.2))
    assert x.grad.item() > 1


def test_log_ratio_reads_action_tokens_alone():
    nan, inf = float("nan"), float("inf")
    new = torch.tensor([[-1.0, -2.0, nan], [inf, nan, nan]], requires_grad=True)
    old = torch.tensor([[-1.5, -1.0, nan], [nan, -inf, 3.0]])
    mask = torch.tensor([[True, True, False], [False, False, False]])
    log_ratio = sequence_log_ratio(new, old, mask)
    assert log_ratio.tolist() == [-0.5, 0.0]
    log_ratio.sum().backward()
    assert new.grad.tolist() == [[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 5), st.integers(0, 4))
def test_padding_changes_no_row(length, padding):
    new, old = torch.linspace(-3, -1, 2 * length).reshape(2, length), torch.full((2, length), -2.0)
    mask = torch.ones(2, length, dtype=torch.bool)
    pad = (0, padding)
    padded = sequence_log_ratio(
        torch.nn.functional.pad(new, pad), torch.nn.functional.pad(old, pad), torch.nn.functional.pad(mask, pad)
    )
    torch.testing.assert_close(padded, sequence_log_ratio(new, old, mask))
    assert padded.shape == (2,)
