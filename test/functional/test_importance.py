from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_rloo.functional.importance import CORRECTIONS, off_policy_mask

ragged_batches = st.lists(st.lists(st.floats(-1.5, 1.5), max_size=5), min_size=1, max_size=4)
NAN = float("nan")


def padded(rows, fill: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(row) for row in rows)
    values = torch.full((len(rows), width), fill, dtype=torch.float64)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        values[i, : len(row)] = torch.tensor(row, dtype=torch.float64)
        mask[i, : len(row)] = True
    return values, mask


def slow_tis(row, t, *, high=2.0):
    return min(math.exp(row[t]), high)


def slow_icepop(row, t, *, low=0.5, high=5.0):
    weight = math.exp(row[t])
    return weight if low <= weight <= high else 0.0


def slow_sequence_truncate(row, t, *, high=2.0):
    return min(math.prod(map(math.exp, row)), high)


def slow_sequence_mask(row, t, *, low=0.0, high=2.0):
    weight = math.prod(map(math.exp, row))
    return weight if low <= weight <= high else 0.0


def slow_seq_mask_tis(row, t, *, low=0.99, high=1.01, token_high=2.0):
    mean = math.prod(map(math.exp, row)) ** (1 / len(row))
    return min(math.exp(row[t]), token_high) if low <= mean <= high else 0.0


SLOW = {
    "tis": slow_tis,
    "icepop": slow_icepop,
    "sequence_truncate": slow_sequence_truncate,
    "sequence_mask": slow_sequence_mask,
    "seq_mask_tis": slow_seq_mask_tis,
}
CASES = [
    ("tis", {}),
    ("tis", {"high": 1.2}),
    ("icepop", {}),
    ("icepop", {"low": 0.8, "high": 1.25}),
    ("sequence_truncate", {}),
    ("sequence_truncate", {"high": 1.1}),
    ("sequence_mask", {}),
    ("sequence_mask", {"low": 0.5, "high": 1.7}),
    ("seq_mask_tis", {}),
    ("seq_mask_tis", {"low": 0.7, "high": 1.4, "token_high": 1.3}),
]


def test_every_correction_is_tried():
    assert {name for name, _ in CASES} == set(CORRECTIONS) == set(SLOW)


@settings(deadline=None, max_examples=25)
@given(ragged_batches)
@pytest.mark.parametrize(("name", "chosen"), CASES, ids=str)
def test_weights_equal_a_slow_loop(name, chosen, rows):
    log_weight, mask = padded(rows)
    weight = CORRECTIONS[name](**chosen)(log_weight, mask)
    assert weight.shape == ((len(rows), 1) if name.startswith("sequence") else mask.shape)
    weight = weight.expand(mask.shape)
    for i, row in enumerate(rows):
        for t in range(len(row)):
            expected = SLOW[name](row, t, **chosen)
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
    (zeros, mask), (huge, _) = padded(rows), padded(rows, fill=50.0)
    expected, ours = CORRECTIONS[name]()(zeros, mask), CORRECTIONS[name]()(huge, mask)
    assert torch.equal(torch.where(mask, ours, 0.0), torch.where(mask, expected, 0.0))


@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_row_without_action_tokens_is_no_trouble(name):
    weight = CORRECTIONS[name]()(torch.zeros(2, 2), torch.tensor([[True, True], [False, False]]))
    assert weight.isfinite().all()


def test_a_mean_weight_does_not_grow_with_the_length():
    mask = torch.ones(1, 500, dtype=torch.bool)
    drift = torch.full((1, 500), 0.005)
    assert (CORRECTIONS["seq_mask_tis"]()(drift, mask) > 0).all()
    assert (CORRECTIONS["sequence_mask"]()(drift, mask) == 0).all()


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
    new, mask = padded([[x for x, _ in pairs] for _, pairs in rows])
    sampler, _ = padded([[y for _, y in pairs] for _, pairs in rows])
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


def test_off_policy_mask_of_token_advantages_keeps_the_good_tokens():
    new, sampler, mask = torch.full((1, 2), -3.0), torch.full((1, 2), -1.0), torch.ones(1, 2, dtype=torch.bool)
    kept = off_policy_mask(new, sampler, torch.tensor([[1.0, -1.0]]), mask, 0.5)
    assert kept.tolist() == [[True, False]]


def test_off_policy_mask_reads_action_tokens_alone_and_carries_no_gradient():
    new = torch.tensor([[-1.0, NAN]], requires_grad=True)
    kept = off_policy_mask(new, torch.tensor([[-1.0, NAN]]), -torch.ones(1, 1), torch.tensor([[True, False]]), 0.1)
    assert kept.tolist() == [[True]] and not kept.requires_grad


@pytest.mark.parametrize(
    ("name", "chosen", "message"),
    [
        ("icepop", {"low": 3.0, "high": 2.0}, "IcePop: high=2.0 must be a number of at least 3"),
        ("sequence_mask", {"low": -1.0}, "low=-1.0"),
        ("tis", {"high": 0.0}, "TIS: high=0.0"),
        ("seq_mask_tis", {"token_high": 0.0}, "token_high=0.0"),
    ],
)
def test_fields_out_of_range_are_refused(name, chosen, message):
    with pytest.raises(ValueError, match=message):
        CORRECTIONS[name](**chosen)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_each_correction_says_whether_it_weighs_tokens(name):
    weight = CORRECTIONS[name]()(torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool))
    assert CORRECTIONS[name].per_token == (weight.shape == (2, 3))
