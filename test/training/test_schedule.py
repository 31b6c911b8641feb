"""The learning-rate schedule."""

from __future__ import annotations

import pytest
import torch

from torchrl_rloo.training import linear_schedule


def rates(total: int, **kwargs) -> list[float]:
    """Return the learning rates of all optimizer steps and the one after them, as shares of the first group's."""
    optimizer = torch.optim.SGD([{"params": [torch.zeros(1)], "lr": 2.0}, {"params": [torch.zeros(1)], "lr": 0.5}])
    schedule = linear_schedule(optimizer, total, **kwargs)
    found = []
    for _ in range(total + 1):
        first, second = schedule.get_last_lr()
        assert second == first / 4 and optimizer.param_groups[0]["lr"] == first
        found.append(first / 2.0)
        optimizer.step()
        schedule.step()
    return found


def test_it_falls_linearly_to_zero():
    assert rates(4) == pytest.approx([1, 3 / 4, 1 / 2, 1 / 4, 0])


def test_it_rises_from_near_zero_while_it_falls():
    rise = [1 / 4, 2 / 4, 3 / 4, 1, 1, 1, 1, 1, 1]
    assert rates(8, warmup_steps=4) == pytest.approx([r * (1 - i / 8) for i, r in enumerate(rise)])


def test_it_ends_at_a_fraction():
    assert rates(4, final_fraction=0.5) == pytest.approx([1, 7 / 8, 3 / 4, 5 / 8, 1 / 2])
    assert rates(4, final_fraction=1.0) == [1.0] * 5


@pytest.mark.parametrize(("total", "warmup"), [(9, 0), (20, 2), (49, 4), (50, 5), (300, 5)])
def test_the_default_rise_takes_a_tenth_of_a_short_run(total, warmup):
    assert rates(total, warmup_steps=None) == rates(total, warmup_steps=warmup)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"warmup_steps": 5}, "warmup_steps=5 must be between 0 and total_steps=4"),
        ({"warmup_steps": -1}, "warmup_steps=-1"),
        ({"final_fraction": 1.5}, "final_fraction=1.5 must be between 0 and 1"),
    ],
    ids=["long", "negative", "growth"],
)
def test_numbers_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        rates(4, **settings)
