from __future__ import annotations

import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_rloo.rewards.lengths import RepetitionPenalty


@given(st.lists(st.integers(0, 2), max_size=12), st.integers(1, 4))
def test_the_share_of_ngrams_seen_before(ids, size):
    seen, repeated, total = [], 0, 0
    for start in range(len(ids)):
        ngram = ids[start : start + size]
        if len(ngram) == size:
            total, repeated = total + 1, repeated + (ngram in seen)
            seen.append(ngram)
    expected = -2.0 * repeated / total if total else 0.0
    assert RepetitionPenalty(size, -2.0)(["?"], ["x"], [ids]) == pytest.approx([expected])


def test_pickles():
    reward = pickle.loads(pickle.dumps(RepetitionPenalty(2, -3.0)))
    assert reward(["?"], ["x"], [[5, 5, 5]]) == [-1.5]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [({"ngram_size": 0}, "ngram_size=0"), *(({"max_penalty": p}, f"penalty={p}") for p in (0.5, -math.inf, math.nan))],
)
def test_settings_out_of_range(arguments, named):
    with pytest.raises(ValueError, match=named):
        RepetitionPenalty(**arguments)
