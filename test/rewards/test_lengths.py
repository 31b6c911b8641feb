from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_rloo.rewards.lengths import SoftOverlong


@given(st.integers(1, 50).flatmap(lambda most: st.tuples(st.just(most), st.integers(0, most))))
def test_falls_from_zero_to_minus_one_in_equal_steps(settings):
    most, cache = settings
    rewards = SoftOverlong(most, cache)(["?"] * 60, ["x"] * 60, [[1] * n for n in range(60)])
    assert rewards[: most - cache + 1] == [0] * (most - cache + 1)
    assert rewards[most + 1 :] == [-1] * (59 - most)
    if cache:
        fall = rewards[most - cache : most + 1]
        assert fall == pytest.approx([-step / cache for step in range(cache + 1)])


def test_pickles():
    reward = pickle.loads(pickle.dumps(SoftOverlong(100, 20)))
    assert reward(["?"], ["x"], [[1] * 90]) == [-0.5]


@pytest.mark.parametrize(
    ("most", "cache", "named"), [(0, 0, "max_completion_len=0"), (9, -1, "cache=-1"), (9, 10, "cache=10")]
)
def test_settings_out_of_range(most, cache, named):
    with pytest.raises(ValueError, match=named):
        SoftOverlong(most, cache)
