"""GroupCache: groups that it keeps, replays and drops. test/collectors/test_refill.py covers its log-probs."""

from __future__ import annotations

import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorDict, TensorDictBase
from torchrl.data import ReplayBuffer, SamplerWithoutReplacement

from torchrl_rloo.data import keys, notices
from torchrl_rloo.data.rows import action_tokens, stack_rows
from torchrl_rloo.modules.policies import ScoredActions
from torchrl_rloo.replay import MCAdvantage, RowStorage
from torchrl_rloo.replay.cache import FIRST_CACHED_GROUP, GroupCache


class Constant:
    """Scorer that gives every action token minus the number of its calls, to tell calls apart."""

    def __init__(self):
        self.calls = 0

    def score(self, rows: TensorDictBase) -> ScoredActions:
        self.calls += 1
        actions = action_tokens(rows)
        values = torch.where(actions.mask, -float(self.calls), 0.0)
        return ScoredActions(log_probs=values, entropy=torch.zeros_like(values), actions=actions)


def group(group_id: int, version: int = 0, size: int = 2) -> list[TensorDictBase]:
    rows = []
    for i in range(size):
        mask = torch.tensor([False, True, True])[: 2 + i % 2]
        entries = {
            keys.GROUP_ID: torch.tensor(group_id),
            keys.POLICY_VERSION: torch.tensor(version + i),
            keys.TOKENS: torch.full((len(mask),), group_id),
            keys.ACTION_MASK: mask,
            keys.LOG_PROBS: torch.where(mask, -0.5, 0.0),
            keys.REWARD: torch.tensor([[float(i)]]),
            keys.ADVANTAGE: torch.tensor([[9.0]]),
            keys.PROXIMAL_LOG_PROBS: torch.zeros(len(mask)),
            "answer": NonTensorData("text"),
        }
        rows.append(TensorDict(entries, []))
    return rows


def batch(*groups: list[TensorDictBase]) -> TensorDictBase:
    return stack_rows([row for rows in groups for row in rows])


def origins(rows: TensorDictBase | None) -> list[int]:
    """Return the group that each row was sampled in, from its tokens."""
    return [] if rows is None else [int(row[keys.TOKENS][0]) for row in rows.unbind(0)]


def test_a_batch_is_filled_up_with_the_newest() -> None:
    cache = GroupCache(8, Constant(), max_uses=3)
    cache.add(batch(group(1, version=3), group(2, version=5), group(3, version=4)))
    filled = cache.fill(batch(group(9, version=6)), 3, policy_version=6)
    assert origins(filled) == [9, 9, 2, 2, 3, 3]
    assert filled[keys.GROUP_ID].tolist() == [9, 9, *[FIRST_CACHED_GROUP] * 2, *[FIRST_CACHED_GROUP + 1] * 2]
    assert filled[keys.POLICY_VERSION].tolist() == [6, 7, 5, 6, 4, 5]
    assert all("answer" not in row.keys() for row in filled.unbind(0))
    assert all(keys.ADVANTAGE not in row.keys() for row in filled[2:].unbind(0))
    assert all("proximal_log_probs" not in row.keys() for row in filled[2:].unbind(0))
    assert [row[keys.LOG_PROBS].tolist() for row in filled[2:4].unbind(0)] == [[0, -1], [0, -1, -1]]
    assert origins(cache.fill(batch(group(10)), 2, policy_version=6)) == [10, 10, 1, 1], "the least used comes first"
    assert len(MCAdvantage(2).inv(filled)) == 6


def test_a_full_batch_needs_none() -> None:
    scorer = Constant()
    cache = GroupCache(8, scorer)
    cache.add(batch(group(1)))
    assert origins(cache.fill(batch(group(2), group(3)), 2, policy_version=0)) == [2, 2, 3, 3]
    assert scorer.calls == 0 and len(cache) == 1


def test_uses_age_and_capacity() -> None:
    cache = GroupCache(2, Constant(), max_uses=1, max_age=2)
    cache.add(batch(group(1, version=0), group(2, version=1), group(3, version=2)))
    assert len(cache) == 2 and cache.counts["cache/evicted"] == 1
    assert origins(cache.fill(None, 1, policy_version=4)) == [3, 3], "2 is three versions behind"
    assert cache.counts["cache/stale"] == 1 and cache.counts["cache/used_up"] == 1 and len(cache) == 0
    assert cache.fill(None, 2, policy_version=4) is None and cache.counts["cache/missing"] == 2


def test_replayed_groups_are_not_cached_again() -> None:
    cache = GroupCache(4, Constant())
    cache.add(batch(group(1)))
    cache.add(batch(group(1)))
    assert len(cache) == 1 and cache.counts["cache/added"] == 1
    cache.add(cache.fill(None, 1, policy_version=0))
    assert len(cache) == 0


@settings(deadline=None, max_examples=25)
@given(st.permutations(range(5)), st.integers(1, 4))
def test_the_order_of_arrival_changes_nothing(order: list[int], capacity: int) -> None:
    groups = [group(g, version) for g, version in ((1, 4), (2, 2), (3, 4), (4, 9), (5, 0))]
    together, apart = (GroupCache(capacity, Constant(), max_age=100) for _ in range(2))
    together.add(batch(*groups))
    for i in order:
        apart.add(batch(groups[i]))
    assert origins(together.fill(None, 3, 9)) == origins(apart.fill(None, 3, 9))


def test_a_restart_continues_exactly() -> None:
    cache = GroupCache(8, Constant(), max_uses=2)
    cache.add(batch(group(1, 3), group(2, 5), group(3, 4, size=3)))
    cache.fill(None, 2, policy_version=5)
    file = io.BytesIO()
    torch.save(cache.state_dict(), file)
    file.seek(0)
    resumed = GroupCache(8, Constant(), max_uses=2)
    resumed.scorer.calls = 1
    resumed.load_state_dict(torch.load(file, weights_only=True))
    for _ in range(3):
        ours, theirs = (c.fill(None, 2, policy_version=7) for c in (resumed, cache))
        assert origins(ours) == origins(theirs)
        if ours is not None:
            assert ours[keys.GROUP_ID].tolist() == theirs[keys.GROUP_ID].tolist()
            for a, b in zip(ours.unbind(0), theirs.unbind(0), strict=True):
                assert torch.equal(a[keys.LOG_PROBS], b[keys.LOG_PROBS])
    assert resumed.counts == cache.counts


@pytest.mark.parametrize("kwargs", [{"capacity": 0}, {"max_uses": 0}, {"max_age": 0}], ids=str)
def test_arguments_are_checked(kwargs: dict) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(kwargs))}=0"):
        GroupCache(**{"capacity": 1, "scorer": Constant(), **kwargs})


def rows(n: int):
    return stack_rows([TensorDict({"tokens": torch.arange(i + 1)}) for i in range(n)])


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "_SHOWN", set())


def make(max_size: int | None, batch_size: int = 4) -> ReplayBuffer:
    return ReplayBuffer(storage=RowStorage(max_size), sampler=SamplerWithoutReplacement(), batch_size=batch_size)


def test_a_step_that_does_not_fit_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    buffer = make(4)
    buffer.extend(rows(8))
    buffer.extend(rows(8))
    assert len(buffer) == 4
    assert len(caplog.messages) == 1 and "max_size=4" in caplog.messages[0]


@pytest.mark.parametrize("max_size", [8, None])
def test_rows_that_were_sampled_or_emptied_may_go(max_size: int | None, caplog: pytest.LogCaptureFixture) -> None:
    buffer = make(max_size)
    for _ in range(3):
        buffer.extend(rows(8))
        assert sum(len(batch) for batch in buffer) == len(buffer)
    buffer.empty()
    for _ in range(2):
        buffer.extend(rows(8))
        buffer.empty()
    assert not caplog.messages


def test_half_of_the_rows_sampled_is_not_enough(caplog: pytest.LogCaptureFixture) -> None:
    buffer = make(8)
    buffer.extend(rows(8))
    buffer.sample()
    buffer.extend(rows(8))
    assert len(caplog.messages) == 1
