from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrl.objectives.value.functional import generalized_advantage_estimate

from torchrl_rloo.functional.gae import gae


def random_batch(lengths: list[int], seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    rewards, values = (torch.randn(mask.shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return rewards, values, mask


def slow(rewards: list[float], values: list[float], discount: float, lam: float) -> list[float]:
    """Compute each advantage as an explicit sum of all future errors."""
    following = [*values[1:], 0.0][: len(values)]
    deltas = [r + discount * n - v for r, v, n in zip(rewards, values, following, strict=True)]
    return [sum((discount * lam) ** (k - t) * deltas[k] for k in range(t, len(deltas))) for t in range(len(deltas))]


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=4).filter(any),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(0, 9),
)
def test_advantages_equal_a_slow_loop(lengths, discount, lam, seed):
    rewards, values, mask = random_batch(lengths, seed)
    advantages, returns = gae(rewards, values, mask, discount, lam)
    for i, n in enumerate(lengths):
        expected = slow(rewards[i, :n].tolist(), values[i, :n].tolist(), discount, lam)
        assert advantages[i, :n].tolist() == pytest.approx(expected, abs=1e-12)
        sums = [a + v for a, v in zip(expected, values[i, :n].tolist(), strict=True)]
        assert returns[i, :n].tolist() == pytest.approx(sums, abs=1e-12)
    assert (advantages[~mask] == 0).all() and (returns[~mask] == 0).all()


def test_its_two_ends():
    rewards, values, mask = random_batch([5, 3])
    advantages, returns = gae(rewards, values, mask, discount=1.0, lam=1.0)
    to_come = torch.where(mask, rewards, 0.0).flip(1).cumsum(1).flip(1)
    torch.testing.assert_close(returns, torch.where(mask, to_come, 0.0))
    torch.testing.assert_close(advantages, torch.where(mask, to_come - values, 0.0))
    one_step, _ = gae(rewards, values, mask, discount=0.9, lam=0.0)
    torch.testing.assert_close(one_step[1, 1], rewards[1, 1] + 0.9 * values[1, 2] - values[1, 1])
    torch.testing.assert_close(one_step[1, 2], rewards[1, 2] - values[1, 2])


def test_it_is_torchrls_where_that_applies():
    rewards, values, _ = random_batch([6, 6])
    done = torch.zeros(2, 6, 1, dtype=torch.bool)
    done[:, -1] = True
    following = torch.cat([values[:, 1:], torch.zeros(2, 1, dtype=torch.float64)], 1)
    theirs, targets = generalized_advantage_estimate(
        0.97, 0.9, values[..., None], following[..., None], rewards[..., None], done
    )
    ours, returns = gae(rewards, values, torch.ones(2, 6, dtype=torch.bool), 0.97, 0.9)
    torch.testing.assert_close(ours, theirs[..., 0], rtol=1e-5, atol=1e-5)  # TorchRL keeps its factors in float32
    torch.testing.assert_close(returns, targets[..., 0], rtol=1e-5, atol=1e-5)


def test_values_beyond_a_row_are_never_read():
    rewards, values, mask = random_batch([4, 2])
    expected = gae(rewards, values, mask)
    rewards[~mask], values[~mask] = torch.nan, torch.inf
    for ours, theirs in zip(gae(rewards, values, mask), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_no_action_tokens_at_all():
    empty = torch.zeros(3, 0)
    advantages, returns = gae(empty, empty, empty.bool())
    assert advantages.shape == returns.shape == (3, 0)
