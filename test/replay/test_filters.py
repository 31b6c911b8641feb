"""ZeroSignalFilter: dropped groups, their kinds, and its place in a buffer."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs import Compose

from torchrl_rloo.data import keys
from torchrl_rloo.data.outcomes import SeparateScores, WeightedScores
from torchrl_rloo.data.rows import stack_rows
from torchrl_rloo.replay import MCAdvantage
from torchrl_rloo.replay.filters import ZeroSignalFilter

NAN = math.nan


def make_rows(*members: tuple[int, float], scores=None) -> TensorDictBase:
    rows = []
    for i, (group, reward) in enumerate(members):
        row = TensorDict({keys.GROUP_ID: torch.tensor(group), keys.REWARD: torch.tensor([[reward]])})
        row.set(keys.REWARDS, torch.tensor([reward] if scores is None else scores[i]))
        rows.append(row.set(keys.TOKENS, torch.arange(i % 3 + 1)))
    return stack_rows(rows)


def groups_of(rows: TensorDictBase) -> list[int]:
    return rows[keys.GROUP_ID].tolist() if len(rows) else []


KINDS = {
    0: ((0.0, 0.0, NAN), "all_wrong"),
    1: ((1.0, 1.0), "all_right"),
    2: ((0.5, 0.5), "flat"),
    3: ((1.0, NAN), "unanswered"),
    4: ((NAN, NAN), "unanswered"),
    5: ((1.0, 0.0), "kept"),
    6: ((0.5, 0.6), "kept"),
    7: ((-1.0, -1.0), "all_wrong"),
}


@settings(deadline=None, max_examples=30)
@given(st.permutations([(g, r) for g, (rewards, _) in KINDS.items() for r in rewards]))
def test_kinds_whatever_the_order(members: list) -> None:
    signal = ZeroSignalFilter()
    kept = signal.keep_informative(make_rows(*members))
    assert groups_of(kept) == [g for g, _ in members if KINDS[g][1] == "kept"], "in the order of the rows"
    assert signal.counts == Counter(f"zero_signal/{kind}" for _, kind in KINDS.values())


def test_a_tolerance() -> None:
    rows = make_rows((0, 0.5), (0, 0.6), (1, 0.0), (1, 1.0))
    signal = ZeroSignalFilter(0.2)
    assert groups_of(signal.keep_informative(rows)) == [1, 1]
    assert signal.counts["zero_signal/flat"] == 1
    assert groups_of(ZeroSignalFilter(0.05).keep_informative(rows)) == [0, 0, 1, 1]
    assert groups_of(ZeroSignalFilter(1.0).keep_informative(rows)) == []


def test_a_kl_does_not_hide_a_dead_group() -> None:
    rows = make_rows(
        (0, 0.93), (0, 0.97), (1, 0.95), (1, -0.02), scores=[[1.0, 3.0], [1.0, 4.0], [1.0, 0.0], [0.0, 0.0]]
    )
    assert groups_of(ZeroSignalFilter().keep_informative(rows)) == [0, 0, 1, 1], "returns after the KL all differ"
    by_accuracy = ZeroSignalFilter(returns=WeightedScores([1.0, 0.0]))
    assert groups_of(by_accuracy.keep_informative(rows)) == [1, 1]
    assert by_accuracy.counts["zero_signal/all_right"] == 1
    assert groups_of(ZeroSignalFilter(returns=SeparateScores()).keep_informative(rows)) == [0, 0, 1, 1]
    with pytest.raises(ValueError, match=r"one weight for each of the 2 scores"):
        ZeroSignalFilter(returns=WeightedScores([1.0])).keep_informative(rows)


def test_raw_scores_where_there_was_shaping() -> None:
    rows = make_rows((0, 0.4), (0, 0.4))
    for row, raw in zip(rows.unbind(0), (0.0, 1.0), strict=True):
        row.set(keys.RAW_REWARDS, torch.tensor([raw]))
    assert groups_of(ZeroSignalFilter(returns=WeightedScores([1.0])).keep_informative(rows)) == []
    assert groups_of(ZeroSignalFilter(returns=WeightedScores([1.0], raw=True)).keep_informative(rows)) == [0, 0]


@pytest.mark.parametrize("split", [1, 2, 3, 8])
def test_in_a_buffer_with_advantages(split: int) -> None:
    """The filter sees whole groups however rows arrive, and dropped groups are never stored."""
    signal = ZeroSignalFilter()
    buffer = ReplayBuffer(storage=LazyStackStorage(16), transform=Compose(signal, MCAdvantage(2)), batch_size=4)
    rows = make_rows((0, 1.0), (1, 0.0), (2, 1.0), (3, 1.0), (1, 0.0), (0, 0.0), (3, 0.0), (2, 1.0))
    for start in range(0, 8, split):
        buffer.extend(rows[start : start + split])
    stored = {(int(r[keys.GROUP_ID]), float(r[keys.ADVANTAGE])) for r in buffer[:].unbind(0)}
    assert stored == {(0, 1.0), (0, -1.0), (3, 1.0), (3, -1.0)} and len(buffer) == 4
    assert signal.counts == {"zero_signal/kept": 2, "zero_signal/all_wrong": 1, "zero_signal/all_right": 1}
    assert len(buffer.sample()) == 4
    assert signal.counts["zero_signal/kept"] == 2, "what is sampled is not judged again"


def test_counts_are_restored() -> None:
    signal, resumed = ZeroSignalFilter(), ZeroSignalFilter()
    signal.keep_informative(make_rows((0, 1.0), (0, 1.0)))
    counts = resumed.counts
    resumed.load_state_dict(signal.state_dict())
    assert resumed.counts is counts and counts == signal.counts


def test_an_empty_batch() -> None:
    rows = ZeroSignalFilter().keep_informative(make_rows((0, 1.0), (0, 1.0)))
    assert len(rows) == 0 and len(ZeroSignalFilter().keep_informative(rows)) == 0


@pytest.mark.parametrize("kwargs", [{"tolerance": -1.0}, {"tolerance": NAN}, {"wrong": 1.0}], ids=str)
def test_arguments_are_checked(kwargs: dict) -> None:
    (name, value), *_ = kwargs.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        ZeroSignalFilter(**kwargs)
