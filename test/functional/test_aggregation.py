from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from torchrl_rloo.functional.aggregation import AGGREGATIONS, aggregate

ragged_batches = st.lists(st.lists(st.floats(-5, 5), max_size=5), min_size=1, max_size=6)
CONSTANT = 12.0
NAN = float("nan")


def padded(rows, width: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(row) for row in rows) if width is None else width
    values = torch.zeros(len(rows), width, dtype=torch.float64)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        values[i, : len(row)] = torch.tensor(row, dtype=torch.float64)
        mask[i, : len(row)] = True
    return values, mask


def slow_weight(mode: str, length: int, num_rows: float, num_tokens: float) -> float:
    """Return the weight of one token's loss."""
    return {
        "sequence_sum": 1 / num_rows,
        "sequence_mean": 1 / (num_rows * max(length, 1)),
        "token_mean": 1 / max(num_tokens, 1),
        "constant": 1 / (num_rows * CONSTANT),
    }[mode]


def chosen(mode: str):
    return {"name": mode, "length": CONSTANT} if mode == "constant" else mode


def ours(rows, mode, **counts) -> torch.Tensor:
    return aggregate(*padded(rows), chosen(mode), **counts)


@settings(deadline=None, max_examples=25)
@given(ragged_batches)
@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_value_and_gradient_equal_a_slow_loop(mode, rows):
    num_tokens = sum(map(len, rows))
    values, mask = padded(rows)
    values.requires_grad_()
    result = aggregate(values, mask, chosen(mode))
    weights = [slow_weight(mode, len(row), len(rows), num_tokens) for row in rows]
    expected = math.fsum(w * x for w, row in zip(weights, rows, strict=True) for x in row)
    assert result.shape == () and result.item() == pytest.approx(expected, abs=1e-12)
    (gradient,) = torch.autograd.grad(result, values)
    for i, row in enumerate(rows):
        assert gradient[i, : len(row)].tolist() == pytest.approx([weights[i]] * len(row), abs=1e-15)
        assert not gradient[i, len(row) :].any()


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_gradcheck(mode):
    values, mask = padded([[1.0, 2.0, 3.0], [], [0.5]])
    values.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: aggregate(x, mask, chosen(mode)), values)


@settings(deadline=None, max_examples=25)
@given(ragged_batches, st.data())
@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_parts_in_any_order_add_up_to_the_whole(mode, rows, data):
    num_tokens = sum(map(len, rows))
    assume(num_tokens)
    shuffled = data.draw(st.permutations(rows))
    cut = data.draw(st.integers(0, len(rows)))
    counts = {"num_rows": len(rows), "num_tokens": num_tokens}
    parts = [ours(part, mode, **counts) for part in (shuffled[:cut], shuffled[cut:]) if part]
    assert sum(p.item() for p in parts) == pytest.approx(ours(rows, mode).item(), abs=1e-12)


@settings(deadline=None, max_examples=25)
@given(ragged_batches, st.integers(1, 4))
@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_padding_changes_nothing(mode, rows, padding):
    width = max(map(len, rows))
    wide = aggregate(*padded(rows, width + padding), chosen(mode))
    assert wide.item() == pytest.approx(ours(rows, mode).item(), abs=1e-12)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_masked_values_are_never_read(mode):
    values = torch.tensor([[1.0, NAN], [math.inf, NAN]], requires_grad=True)
    mask = torch.tensor([[True, False], [False, False]])
    result = aggregate(values, mask, chosen(mode))
    (gradient,) = torch.autograd.grad(result, values)
    assert result.isfinite() and gradient.isfinite().all() and (gradient[~mask] == 0).all()


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (2, 3)], ids=str)
def test_nothing_to_sum_is_zero(mode, shape):
    values = torch.ones(shape, requires_grad=True)
    result = aggregate(values, torch.zeros(shape, dtype=torch.bool), chosen(mode))
    (gradient,) = torch.autograd.grad(result, values)
    assert result.item() == 0 and not gradient.any()


def test_all_modes_agree_on_one_sequence_up_to_its_length():
    rows = [[1.0, 2.0, 6.0]]
    results = {mode: ours(rows, mode).item() for mode in AGGREGATIONS}
    assert results == {
        "sequence_sum": 9.0,
        "sequence_mean": 3.0,
        "token_mean": 3.0,
        "constant": pytest.approx(9.0 / CONSTANT),
    }


def test_a_function_aggregates_too():
    def largest(values, mask, num_rows, num_tokens):
        assert (num_rows, num_tokens) == (2, 3)
        return values[mask].max()

    values, mask = padded([[1.0, 5.0], [2.0]])
    assert aggregate(values, mask, largest).item() == 5.0
