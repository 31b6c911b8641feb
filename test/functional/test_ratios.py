from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_rloo.functional.ratios import (
    MAX_LOG_RATIO,
    RATIOS,
    exp_log_ratio,
    mean_log_ratio,
    no_ratio,
    sequence_log_ratio,
    split_among_tokens,
    token_log_ratio,
)

token_pairs = st.tuples(st.floats(-9, 0), st.floats(-9, 0))
ragged_batches = st.lists(st.lists(token_pairs, max_size=5), min_size=1, max_size=4)
NAN, INF = float("nan"), float("inf")


def padded(rows, width: int | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return each row's ``log_probs``, ``old_log_probs`` and ``mask``, padded to ``[B, A]``."""
    width = max(len(row) for row in rows) if width is None else width
    new, old = torch.zeros(2, len(rows), width, dtype=torch.float64)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        for t, (x, y) in enumerate(row):
            new[i, t], old[i, t], mask[i, t] = x, y, True
    return new, old, mask


def slow_value(name: str, row, t: int) -> float:
    """Compute the log-ratio of token ``t`` of a row."""
    differences = [new - old for new, old in row]
    if name == "none":
        return 0.0
    if name == "token":
        return differences[t]
    return math.fsum(differences) / (1 if name == "sequence" else len(row))


@settings(deadline=None, max_examples=25)
@given(ragged_batches)
@pytest.mark.parametrize("name", RATIOS)
def test_values_equal_a_slow_loop(name, rows):
    new, old, mask = padded(rows)
    result = RATIOS[name](new, old, mask)
    assert result.shape == ((len(rows), 1) if name == "sequence" else mask.shape)
    result = result.expand(mask.shape)
    for i, row in enumerate(rows):
        for t in range(len(row)):
            assert result[i, t].item() == pytest.approx(slow_value(name, row, t), abs=1e-12)


def test_the_sequence_ratio_of_a_row_without_tokens_is_one():
    new, old, mask = padded([[(-1.0, -2.0)], []])
    assert sequence_log_ratio(new, old, mask).tolist() == [[1.0], [0.0]]


def test_tokens_that_are_no_actions_have_log_ratio_zero():
    new, old, mask = padded([[(-1.0, -2.0)], [(-3.0, -1.0), (-1.0, -1.5)]])
    assert token_log_ratio(new, old, mask).tolist() == [[1.0, 0.0], [-2.0, 0.5]]


@settings(deadline=None, max_examples=25)
@given(ragged_batches)
@pytest.mark.parametrize("name", RATIOS)
def test_gradient_is_that_of_the_definition(name, rows):
    """The gradient of ``sequence`` reaches all tokens; that of the other ratios only their own token."""
    new, old, mask = padded(rows)
    width = mask.shape[1]
    new.requires_grad_()
    result = RATIOS[name](new, old, mask).expand(mask.shape)
    for i, row in enumerate(rows):
        for t in range(len(row)):
            (gradient,) = torch.autograd.grad(result[i, t], new, retain_graph=True)
            expected = torch.zeros(len(rows), width, dtype=torch.float64)
            expected[i, slice(len(row)) if name == "sequence" else t] = 1
            torch.testing.assert_close(gradient, expected)


def test_gradcheck():
    """Gradients match finite differences if the gradient is that of the value."""
    generator = torch.Generator().manual_seed(0)
    new, old = torch.randn(2, 3, 4, dtype=torch.float64, generator=generator)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]]).bool()
    new.requires_grad_()
    for function in (token_log_ratio, sequence_log_ratio):
        assert torch.autograd.gradcheck(lambda x, f=function: f(x, old, mask), new)
    assert torch.autograd.gradcheck(
        exp_log_ratio, torch.tensor([-3.0, 0.0, 2.0], dtype=torch.float64, requires_grad=True)
    )


def test_the_gradient_of_no_ratio_is_that_of_the_log_prob_whoever_sampled():
    new, old, mask = padded([[(-1.0, -7.0), (-2.0, 0.0)]])
    new.requires_grad_()
    result = no_ratio(new, torch.full_like(old, NAN), mask)
    assert result.tolist() == [[0.0, 0.0]]
    (gradient,) = torch.autograd.grad(result.sum(), new)
    assert gradient.tolist() == [[1.0, 1.0]]


def test_the_mean_ratio_averaged_over_its_sequence_has_gspos_gradient():
    new, old, mask = padded([[(-1.0, -1.5), (-2.0, -1.8), (-0.5, -0.6)]])
    new.requires_grad_()
    ratio = exp_log_ratio(mean_log_ratio(new, old, mask))
    (ours,) = torch.autograd.grad((ratio * mask).sum() / 3, new)
    (gspo,) = torch.autograd.grad(((new - old).sum() / 3).exp(), new)
    torch.testing.assert_close(ours, gspo)


@pytest.mark.parametrize("name", RATIOS)
def test_only_action_tokens_are_read(name):
    new = torch.tensor([[-1.0, -2.0, NAN], [INF, NAN, NAN]], requires_grad=True)
    old = torch.tensor([[-1.5, -1.0, NAN], [NAN, -INF, 3.0]])
    mask = torch.tensor([[True, True, False], [False, False, False]])
    result = RATIOS[name](new, old, mask)
    kept = torch.where(mask, result.expand(mask.shape), 0.0)
    assert kept.isfinite().all()
    (gradient,) = torch.autograd.grad(kept.sum(), new)
    assert (gradient[~mask] == 0).all() and gradient.isfinite().all()


@settings(deadline=None, max_examples=25)
@given(ragged_batches, st.integers(0, 4))
@pytest.mark.parametrize("name", RATIOS)
def test_padding_changes_no_row(name, rows, padding):
    width = max(len(row) for row in rows)
    plain = RATIOS[name](*padded(rows))
    wide = RATIOS[name](*padded(rows, width + padding))
    mask = padded(rows)[2]
    torch.testing.assert_close(
        wide.expand(-1, width + padding)[:, :width][mask], plain.expand(-1, width)[mask], rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("name", RATIOS)
def test_ratios_are_one_while_the_policy_is_the_one_that_sampled(name):
    new, _, mask = padded([[(-1.0, 0.0), (-2.0, 0.0)], [(-0.3, 0.0)]])
    assert (exp_log_ratio(RATIOS[name](new, new, mask)) == 1).all()


@settings(deadline=None, max_examples=25)
@given(st.floats(-30, MAX_LOG_RATIO))
def test_ratio_of_is_the_exponential(x):
    assert exp_log_ratio(torch.tensor(x, dtype=torch.float64)).item() == pytest.approx(math.exp(x), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("x", [21.0, 88.8, 100.0, 1000.0])
def test_ratio_of_continues_as_a_straight_line(x, dtype):
    log_ratio = torch.tensor(x, dtype=dtype, requires_grad=True)
    ratio = exp_log_ratio(log_ratio)
    (slope,) = torch.autograd.grad(ratio, log_ratio)
    top = math.exp(MAX_LOG_RATIO)
    assert ratio.item() == pytest.approx(top * (1 + x - MAX_LOG_RATIO), rel=1e-5)
    assert slope.item() == pytest.approx(top, rel=1e-5)


@pytest.mark.parametrize("x", [-100.0, -1000.0])
def test_ratio_of_far_below_one_is_zero_without_gradient(x):
    log_ratio = torch.tensor(x, requires_grad=True)
    ratio = exp_log_ratio(log_ratio)
    (slope,) = torch.autograd.grad(ratio, log_ratio)
    assert ratio.item() == pytest.approx(0, abs=1e-40) and slope.item() == pytest.approx(0, abs=1e-40)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.tuples(st.floats(-5, 5), st.integers(1, 4)), min_size=1, max_size=4))
def test_sharing_out_keeps_each_sequences_sum(rows):
    objective = torch.tensor([[x] for x, _ in rows], dtype=torch.float64)
    mask = torch.tensor([[t < n for t in range(4)] for _, n in rows])
    shares = split_among_tokens(objective, mask)
    assert shares.shape == mask.shape
    for i, (x, n) in enumerate(rows):
        for t in range(n):
            assert shares[i, t].item() == pytest.approx(x / n, abs=1e-12)


def test_an_objective_of_each_token_is_not_shared_out():
    objective = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert torch.equal(split_among_tokens(objective, torch.ones(2, 2, dtype=torch.bool)), objective)


@pytest.mark.parametrize("width", [0, 1, 3])
def test_a_row_without_tokens_has_nothing_to_share(width):
    objective = torch.tensor([[2.0]], requires_grad=True)
    shares = split_among_tokens(objective, torch.zeros(1, width, dtype=torch.bool))
    (gradient,) = torch.autograd.grad(shares.sum(), objective)
    assert shares.isfinite().all() and gradient.isfinite().all()


def test_a_sequence_of_one_token_is_the_same_at_every_level():
    new, old, mask = padded([[(-1.0, -1.4)], [(-2.0, -1.0)]])
    for name in ("sequence", "sequence_mean"):
        torch.testing.assert_close(RATIOS[name](new, old, mask), token_log_ratio(new, old, mask))
