from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_rloo.functional.rewards import combine_rewards

NAN = float("nan")


def slow_combine(rewards: list[list[float]], weights: list[float], clip: tuple[float, float] | None) -> list[float]:
    result = []
    for row in rewards:
        answered = [w * r for w, r in zip(weights, row, strict=True) if not math.isnan(r)]
        total = math.fsum(answered) if answered else NAN
        result.append(total if clip is None or math.isnan(total) else min(max(total, clip[0]), clip[1]))
    return result


@st.composite
def scores(draw):
    functions, rows = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    score = st.one_of(st.just(NAN), st.floats(-5, 5))
    rewards = draw(st.lists(st.lists(score, min_size=functions, max_size=functions), min_size=rows, max_size=rows))
    weights = draw(st.lists(st.floats(-2, 2), min_size=functions, max_size=functions))
    return rewards, weights


@settings(deadline=None, max_examples=60)
@given(scores(), st.sampled_from([None, (-1.0, 1.0), (0.0, 3.0), (-math.inf, 0.5)]))
def test_equals_a_slow_loop(case, clip):
    rewards, weights = case
    result = combine_rewards(torch.tensor(rewards, dtype=torch.float64), weights, clip)
    expected = torch.tensor(slow_combine(rewards, weights, clip), dtype=torch.float64)
    torch.testing.assert_close(result, expected, atol=1e-9, rtol=0, equal_nan=True)


def test_one_answer_is_enough_and_none_abstains():
    rewards = torch.tensor([[1.0, NAN], [NAN, 2.0], [NAN, NAN], [1.0, 2.0]])
    assert combine_rewards(rewards, [1.0, 0.5]).nan_to_num(-9.0).tolist() == [1.0, 1.0, -9.0, 2.0]


def test_the_weighted_sum_is_clipped_and_not_its_parts():
    assert combine_rewards(torch.tensor([[5.0, -4.5]]), [1.0, 1.0], (-1.0, 1.0)).item() == 0.5
    assert combine_rewards(torch.tensor([[0.8, 0.8]]), [1.0, 1.0], (-1.0, 1.0)).item() == 1.0


def test_clipping_does_not_revive_a_row_that_abstains():
    assert combine_rewards(torch.tensor([[NAN]]), [1.0], (-1.0, 1.0)).isnan().all()


@pytest.mark.parametrize("shape", [(0, 2), (3, 2)])
def test_shape_and_dtype(shape):
    result = combine_rewards(torch.zeros(shape), [1, 2])
    assert result.shape == shape[:1] and result.dtype == torch.float32
