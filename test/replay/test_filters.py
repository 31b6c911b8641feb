"""ZeroSignalFilter: dropped groups, their kinds, and its place in a buffer."""

from __future__ import annotations

import math
import re
from collections import Counter
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs import Compose, Transform

from torchrl_rloo.data import keys
from torchrl_rloo.data.outcomes import SeparateScores, WeightedScores
from torchrl_rloo.data.rows import stack_rows
from torchrl_rloo.replay import MCAdvantage
from torchrl_rloo.replay.filters import TopKSelector, ZeroSignalFilter, merge_groups, select_top_k, top_by_variance

NAN = math.nan


def make_rows(*members: tuple[int, float], scores=None) -> TensorDictBase:
    rows = []
    for i, (group, reward) in enumerate(members):
        row = TensorDict({keys.GROUP_ID: torch.tensor(group), keys.REWARD: torch.tensor([[reward]])})
        row.set(keys.REWARDS, torch.tensor([reward, -reward] if scores is None else scores[i]))
        rows.append(row.set(keys.TOKENS, torch.arange(i % 3 + 1)).set("place", torch.tensor(i)))
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


def test_a_range_of_the_mean_return() -> None:
    members = [
        (0, 0.0),
        (0, 1.0),
        (1, 0.0),
        (1, 0.0),
        (1, 0.0),
        (1, 1.0),
        (2, 1.0),
        (2, 1.0),
        (3, 0.0),
        (3, NAN),
        (3, 1.0),
    ]
    signal = ZeroSignalFilter(mean_range=(0.25, 0.9))
    assert groups_of(signal.keep_informative(make_rows(*members))) == [0, 0, 3, 3, 3], "the bounds are excluded"
    assert signal.counts == Counter({"zero_signal/kept": 2, "zero_signal/out_of_range": 1, "zero_signal/all_right": 1})
    with pytest.raises(ValueError, match="cannot be combined with several returns per row"):
        ZeroSignalFilter(mean_range=(0.1, 0.9), returns=SeparateScores()).keep_informative(make_rows(*members))


def test_groups_of_one_prompt_merge() -> None:
    rows = make_rows((4, 1.0), (5, 0.5), (4, 0.0), (7, 0.0), (7, 1.0), (6, 0.5))
    prompts = {4: 1, 5: 2, 6: 3, 7: 1}
    for row in rows.unbind(0):
        row.set(keys.PROMPT_ID, torch.tensor(prompts[int(row[keys.GROUP_ID])]))
    merged = merge_groups(rows)
    found = [(int(r[keys.GROUP_ID]), int(r[keys.GROUP_SIZE]), float(r[keys.REWARD])) for r in merged.unbind(0)]
    assert found == [(4, 4, 1.0), (4, 4, 0.0), (4, 4, 0.0), (4, 4, 1.0), (5, 1, 0.5), (6, 1, 0.5)]
    assert groups_of(rows) == [4, 5, 4, 7, 7, 6], "the rows of the caller stay as they were"
    advantages = MCAdvantage().inv(merged[:4])[keys.ADVANTAGE].flatten().tolist()
    assert advantages == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])


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
    assert groups_of(ZeroSignalFilter(returns=WeightedScores([1.0, 1.0])).keep_informative(rows)) == []
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


WRONG = [{"tolerance": -1.0}, {"tolerance": NAN}, {"wrong": 1.0}, {"mean_range": [0.9, 0.1]}]


@pytest.mark.parametrize("kwargs", WRONG, ids=str)
def test_arguments_are_checked(kwargs: dict) -> None:
    (name, value), *_ = kwargs.items()
    with pytest.raises(ValueError, match=re.escape(f"{name}={value}")):
        ZeroSignalFilter(**kwargs)


QUARTERS = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0])  # exact in float32, with many ties


def rewards_of(rows: TensorDictBase) -> list[float]:
    return rows[keys.REWARD].flatten().tolist()


def written(transform: Transform, *batches: TensorDictBase) -> TensorDictBase:
    buffer = ReplayBuffer(storage=LazyStackStorage(100), transform=transform)
    for batch in batches:
        buffer.extend(batch)
    return buffer[:]


@settings(deadline=None, max_examples=40)
@given(st.lists(QUARTERS, min_size=1, max_size=7), st.integers(1, 7))
def test_no_choice_varies_more(rewards: list[float], k: int) -> None:
    returns, k = torch.tensor(rewards, dtype=torch.float64), min(k, len(rewards))
    chosen = top_by_variance(returns, k).tolist()
    assert len(set(chosen)) == k
    spread = [float(returns[list(some)].var(correction=0)) for some in combinations(range(len(rewards)), k)]
    assert float(returns[chosen].var(correction=0)) == pytest.approx(max(spread))


@settings(deadline=None, max_examples=40)
@given(st.permutations([(g, r) for g in range(3) for r in (0.0, 0.25, 0.5, 0.5, 1.0)]), st.integers(1, 6))
def test_the_best_of_each_group_in_the_order_of_the_rows(members: list, k: int) -> None:
    kept = select_top_k(make_rows(*members), k)
    assert kept["place"].tolist() == sorted(kept["place"].tolist())
    assert kept[keys.GROUP_SIZE].tolist() == [min(k, 5)] * len(kept)
    for group in range(3):
        stayed = [r for g, r in zip(kept[keys.GROUP_ID].tolist(), rewards_of(kept), strict=True) if g == group]
        assert sorted(stayed, reverse=True) == [1.0, 0.5, 0.5, 0.25, 0.0][:k]


def test_rows_that_abstain_are_left_out_and_counted() -> None:
    selector = TopKSelector(2)
    kept = written(selector, make_rows((0, NAN), (0, 0.5), (0, NAN), (1, NAN), (2, 0.0), (2, 0.25), (2, 1.0)))
    assert rewards_of(kept) == [0.5, 0.25, 1.0] and kept[keys.GROUP_SIZE].tolist() == [1, 2, 2]
    assert selector.counts == {"top_k/kept": 3, "top_k/left_out": 4}
    buffer = ReplayBuffer(storage=LazyStackStorage(100), transform=TopKSelector(2))
    buffer.extend(make_rows((0, NAN), (0, NAN)))
    assert len(buffer) == 0


def test_another_return_decides() -> None:
    rows = make_rows((0, 0.0), (0, 0.5), (0, 1.0))
    assert rewards_of(select_top_k(rows, 1, returns=WeightedScores([0.0, 1.0]))) == [0.0]
    assert keys.GROUP_SIZE not in rows[1].keys(), "the rows of the caller are not changed"
    with pytest.raises(ValueError, match=r"returns gave \(3, 2\), .* \[3\]"):
        select_top_k(rows, 1, returns=SeparateScores())


def test_after_the_advantage_baselines_are_of_the_whole_group() -> None:
    rows = make_rows((0, 0.0), (0, 0.25), (0, 0.5), (0, 1.0))
    kept = written(Compose(TopKSelector(2), MCAdvantage(4)), rows)
    assert kept[keys.ADVANTAGE].flatten().tolist() == pytest.approx([0.5 - 1.25 / 3, 1.0 - 0.25])


def test_before_it_they_are_of_the_rows_kept_whatever_the_order_of_arrival() -> None:
    members = [(g, r) for g in (0, 1) for r in (0.0, 0.25, 0.5, 1.0)]
    rows = make_rows(*members)
    selector = TopKSelector(3, 4)
    order = [5, 0, 2, 7, 1, 4, 3, 6]
    kept = written(Compose(MCAdvantage(), selector), *[rows[i : i + 1] for i in order])
    assert selector.pending_rows == 0 and len(kept) == 6
    expected = {0.25: 0.25 - 0.75, 0.5: 0.5 - 0.625, 1.0: 1.0 - 0.375}
    for reward, advantage in zip(rewards_of(kept), kept[keys.ADVANTAGE].flatten().tolist(), strict=True):
        assert advantage == pytest.approx(expected[reward])


def test_held_back_rows_survive_a_restart() -> None:
    rows = make_rows((0, 1.0), (0, 0.5), (1, 0.0), (0, 0.0), (1, 1.0), (1, 0.5))
    first = TopKSelector(2, 3, max_pending_groups=5)
    kept = written(first, rows[:5])
    second = TopKSelector(2, 3, max_pending_groups=5)
    second.load_state_dict(first.state_dict())
    assert second.counts == first.counts == {"top_k/kept": 2, "top_k/left_out": 1} and second.pending_rows == 2
    rest = written(second, rows[5:])
    assert rewards_of(kept) + rewards_of(rest) == rewards_of(written(TopKSelector(2, 3), rows))


def test_groups_that_never_complete_go_and_are_counted() -> None:
    selector = TopKSelector(2, 3, max_pending_groups=1)
    buffer = ReplayBuffer(storage=LazyStackStorage(10), transform=selector)
    buffer.extend(make_rows((0, 1.0), (1, 1.0), (1, 0.5)))
    assert selector.pending_rows == 2
    assert selector.counts == {"top_k/expired_groups": 1, "top_k/expired_rows": 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": 0}, "k=0 must be at least 1"),
        ({"k": 1, "num_generations": 4}, "k=1 must be at least 2 and at most num_generations=4"),
        ({"k": 5, "num_generations": 4}, "k=5 .* num_generations=4"),
        ({"k": 2, "by": "luck"}, r"by='luck' must be one of \['reward', 'variance'\]"),
        ({"k": 2, "max_pending_groups": 3}, "max_pending_groups=3 has no effect without num_generations"),
    ],
)
def test_invalid_settings_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TopKSelector(**arguments)


@pytest.mark.parametrize("by", ["reward", "variance"])
def test_no_rows_stay_no_rows(by):
    rows = stack_rows([TensorDict({"group_id": torch.tensor(0), ("next", "reward"): torch.ones(1, 1)})])
    assert len(select_top_k(rows[:0], 2, by)) == 0 and len(select_top_k(select_top_k(rows[:0], 2), 2, by)) == 0
