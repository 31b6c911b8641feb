from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.plain_losses import plain_weight
from torchrl_rloo.functional.ratios import (
    CORRECTIONS,
    MAX_LOG_RATIO,
    RATIOS,
    exp_log_ratio,
    mean_log_ratio,
    no_ratio,
    off_policy_mask,
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


def test_tokens_that_are_no_actions_have_log_ratio_zero():
    new, old, mask = padded([[(-1.0, -2.0)], [(-3.0, -1.0), (-1.0, -1.5)]])
    assert token_log_ratio(new, old, mask).tolist() == [[1.0, 0.0], [-2.0, 0.5]]
    new, old, mask = padded([[(-1.0, -2.0)], []])
    assert sequence_log_ratio(new, old, mask).tolist() == [[1.0], [0.0]]


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


@pytest.mark.parametrize("name", RATIOS)
def test_ratios_are_one_while_the_policy_is_the_one_that_sampled(name):
    new, _, mask = padded([[(-1.0, 0.0), (-2.0, 0.0)], [(-0.3, 0.0)]])
    assert (exp_log_ratio(RATIOS[name](new, new, mask)) == 1).all()


@settings(deadline=None, max_examples=25)
@given(st.floats(-30, MAX_LOG_RATIO))
def test_ratio_of_is_the_exponential(x):
    assert exp_log_ratio(torch.tensor(x, dtype=torch.float64)).item() == pytest.approx(math.exp(x), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("x", [-1000.0, -100.0, 21.0, 88.8, 100.0, 1000.0])
def test_ratio_of_continues_as_a_straight_line_and_ends_at_zero(x, dtype):
    log_ratio = torch.tensor(x, dtype=dtype, requires_grad=True)
    ratio = exp_log_ratio(log_ratio)
    (slope,) = torch.autograd.grad(ratio, log_ratio)
    top = math.exp(MAX_LOG_RATIO) if x > 0 else 0.0
    assert ratio.item() == pytest.approx(top * (1 + x - MAX_LOG_RATIO), rel=1e-5, abs=1e-40)
    assert slope.item() == pytest.approx(top, rel=1e-5, abs=1e-40)


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
    assert torch.equal(split_among_tokens(shares, mask), shares)  # an objective of each token is not shared out


@pytest.mark.parametrize("width", [0, 1, 3])
def test_a_row_without_tokens_has_nothing_to_share(width):
    objective = torch.tensor([[2.0]], requires_grad=True)
    shares = split_among_tokens(objective, torch.zeros(1, width, dtype=torch.bool))
    (gradient,) = torch.autograd.grad(shares.sum(), objective)
    assert shares.isfinite().all() and gradient.isfinite().all()


weight_batches = st.lists(st.lists(st.floats(-1.5, 1.5), max_size=5), min_size=1, max_size=4)


def padded_weights(rows, fill: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(row) for row in rows)
    values = torch.full((len(rows), width), fill, dtype=torch.float64)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        values[i, : len(row)] = torch.tensor(row, dtype=torch.float64)
        mask[i, : len(row)] = True
    return values, mask


CASES = [
    ("tis", {}),
    ("tis", {"high": 1.2}),
    ("tis", {"low": 0.8, "high": 1.2}),
    ("icepop", {}),
    ("icepop", {"low": 0.8, "high": 1.25}),
    ("sequence_truncate", {}),
    ("sequence_truncate", {"high": 1.1}),
    ("sequence_truncate", {"low": 0.9, "high": 1.1}),
    ("sequence_mask", {}),
    ("sequence_mask", {"low": 0.5, "high": 1.7}),
    ("seq_mask_tis", {}),
    ("seq_mask_tis", {"low": 0.7, "high": 1.4, "token_high": 1.3}),
]


def test_every_correction_is_tried():
    assert {name for name, _ in CASES} == set(CORRECTIONS)


@settings(deadline=None, max_examples=25)
@given(weight_batches)
@pytest.mark.parametrize(("name", "chosen"), CASES, ids=str)
def test_weights_equal_a_slow_loop(name, chosen, rows):
    log_weight, mask = padded_weights(rows)
    weight = CORRECTIONS[name](**chosen)(log_weight, mask)
    assert weight.shape == ((len(rows), 1) if name.startswith("sequence") else mask.shape)
    assert CORRECTIONS[name].per_token == (not name.startswith("sequence")) and weight.isfinite().all()
    weight = weight.expand(mask.shape)
    for i, row in enumerate(rows):
        for t in range(len(row)):
            expected = plain_weight(name, row, t, **chosen)
            bounds = [chosen[k] for k in chosen if k != "token_high"] + [0.99, 1.01, 2.0, 0.5, 5.0]
            sums = (math.exp(row[t]), math.exp(math.fsum(row)), math.exp(math.fsum(row) / len(row)))
            if not any(abs(x - bound) < 1e-9 for x in sums for bound in bounds):  # rounding decides here
                assert weight[i, t].item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("name", "chosen"), CASES, ids=str)
def test_equal_policies_have_weight_one(name, chosen):
    weight = CORRECTIONS[name](**chosen)(torch.zeros(2, 3), torch.tensor([[True] * 3, [True, False, False]]))
    assert (weight == 1).all()


@pytest.mark.parametrize("log_weight", [-1000.0, -100.0, 100.0, 1000.0])
@pytest.mark.parametrize(("name", "chosen"), CASES, ids=str)
def test_extreme_weights_are_finite_and_bounded(name, chosen, log_weight):
    weight = CORRECTIONS[name](**chosen)(torch.full((2, 3), log_weight), torch.ones(2, 3, dtype=torch.bool))
    assert weight.isfinite().all() and (weight >= 0).all() and (weight <= 5).all()


@pytest.mark.parametrize("name", [n for n in CORRECTIONS if n.startswith("seq")])
def test_other_tokens_do_not_enter_the_weight_of_a_sequence(name):
    rows = [[0.004, -0.002], [0.001]]
    (zeros, mask), (huge, _) = padded_weights(rows), padded_weights(rows, fill=50.0)
    expected, ours = CORRECTIONS[name]()(zeros, mask), CORRECTIONS[name]()(huge, mask)
    assert torch.equal(torch.where(mask, ours, 0.0), torch.where(mask, expected, 0.0))


@settings(deadline=None, max_examples=25)
@given(
    st.lists(
        st.tuples(st.floats(-2, 2), st.lists(st.tuples(st.floats(-3, 0), st.floats(-3, 0)), max_size=4)),
        min_size=1,
        max_size=4,
    ),
    st.floats(0.01, 1.0),
)
def test_off_policy_mask_equals_a_slow_loop(rows, threshold):
    new, mask = padded_weights([[x for x, _ in pairs] for _, pairs in rows])
    sampler, _ = padded_weights([[y for _, y in pairs] for _, pairs in rows])
    advantages = torch.tensor([[a] for a, _ in rows], dtype=torch.float64)
    kept = off_policy_mask(new, sampler, advantages, mask, threshold)
    assert kept.dtype == torch.bool and kept.shape[0] == len(rows)
    wide = off_policy_mask(new, sampler, advantages.expand(mask.shape), mask, threshold)
    for i, (advantage, pairs) in enumerate(rows):
        if not pairs:
            continue
        gone = math.fsum(y - x for x, y in pairs) / len(pairs)
        if abs(gone - threshold) < 1e-9:
            continue
        expected = not (advantage < 0 and gone > threshold)
        assert kept[i, 0].item() == expected
        assert wide.expand(mask.shape)[i, : len(pairs)].tolist() == [expected] * len(pairs)


def test_off_policy_mask_reads_action_tokens_keeps_good_ones_and_carries_no_gradient():
    new = torch.tensor([[-1.0, NAN]], requires_grad=True)
    kept = off_policy_mask(new, torch.tensor([[-1.0, NAN]]), -torch.ones(1, 1), torch.tensor([[True, False]]), 0.1)
    assert kept.tolist() == [[True]] and not kept.requires_grad
    new, sampler, mask = torch.full((1, 2), -3.0), torch.full((1, 2), -1.0), torch.ones(1, 2, dtype=torch.bool)
    kept = off_policy_mask(new, sampler, torch.tensor([[1.0, -1.0]]), mask, 0.5)
    assert kept.tolist() == [[True, False]]  # a good token stays in a row that left


@pytest.mark.parametrize(
    ("name", "chosen", "message"),
    [
        ("icepop", {"low": 3.0, "high": 2.0}, "IcePop: high=2.0 must be a number of at least 3"),
        ("sequence_mask", {"low": -1.0}, "low=-1.0"),
        ("tis", {"high": 0.0}, "TIS: high=0.0"),
        ("tis", {"low": 3.0}, "TIS: high=2.0 must be a number of at least 3"),
        ("seq_mask_tis", {"token_high": 0.0}, "token_high=0.0"),
    ],
)
def test_fields_out_of_range_are_refused(name, chosen, message):
    with pytest.raises(ValueError, match=message):
        CORRECTIONS[name](**chosen)
